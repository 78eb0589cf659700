"""Read the executed notebooks of a sweep back: one table as CSV, and a page with the table, plots and the notebooks.

All that a page shows is in the page or beside it, so a report can be read offline, and moved with its folder.
"""

import base64
import csv
import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat

from amp_utils import lesson as lessons
from amp_utils.course import write_whole

Row = dict[str, Any]
Lines = dict[str, dict[Any, float]]  # height by place, by label of the line
PAGE = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222 }}
.wide {{ overflow-x: auto }} .failed {{ color: #a33b00 }} img {{ max-width: 36rem; width: 100%; margin-top: 1.5rem }}
table {{ border-collapse: collapse; font-size: .9rem }} th {{ text-align: left; vertical-align: bottom }}
td, th {{ padding: .25rem .75rem; border-bottom: 1px solid #ddd }} td {{ text-align: right; white-space: nowrap }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def prepare() -> None:
    """Import what pages and plots need, which takes seconds, at a time when there is nothing else to do."""
    for name in ("pages", "plots"):
        import_module(f"amp_utils.{name}")


def outward(url: str) -> str:
    """A link as it is where it leads into the page or to the web: the other lessons are not beside a run."""
    return url if url.startswith("#") or "://" in url else ""


def page(lesson: Path, folder: Path) -> Path | None:
    """The notebook that a run has left, finished or failed, as a page, rendered where it is not there yet."""
    notebooks = folder / lesson.name, folder / f"{lesson.stem}.failed.ipynb"
    notebook = next(filter(Path.exists, notebooks), None)
    if notebook is None:
        return None
    target = notebook.with_suffix(".html")
    if not target.exists() or target.stat().st_mtime < notebook.stat().st_mtime:
        from amp_utils.course import pages

        try:
            body = pages.cells(nbformat.read(notebook, as_version=4), lesson.parent, outward)
        except pages.PageError as error:
            body = html.escape(str(error))
        write_whole(target, pages.page(f"{folder.name} · {lesson.stem}", body))
    return target


def flat(results: Mapping[str, Any], words: Sequence[Any] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of each single result; the names of nested ones are joined by dots.

    Of results by name, a lone one whose name is one of the run's own `words` needs no name:

    >>> dict(flat({"loss": {"bf16": 0.5}, "runs": {"a": 1, "b": 2}}, words=["bf16"]))
    {'loss': 0.5, 'runs.a': 1, 'runs.b': 2}
    """
    for name, value in results.items():
        if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in words:
            (value,) = value.values()
        if isinstance(value, dict):
            yield from ((f"{name}.{rest}", single) for rest, single in flat(value))
        else:
            yield name, value


def read_back(
    lesson: Path, out: Path, runs: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> list[Row]:
    """A row for each run: its name, parameters, outcome and seconds, then what the lesson recorded and settled."""
    rows = []
    for name, parameters in runs.items():
        row: Row = {
            "run": name,
            **parameters,
            "outcome": "failed" if name in failures else "missing",
            "took (s)": None,
        }
        if (out / name / lesson.name).exists():
            notebook = nbformat.read(out / name / lesson.name, as_version=4)
            row |= {"outcome": "done", "took (s)": round(notebook.metadata.papermill.duration, 1)}
            results = dict(flat(lessons.recorded(notebook), list(parameters.values())))
            row |= {
                f"recorded {column}" if column in row else column: value
                for column, value in results.items()
            }
            row |= {f"claim:{claim}": value for claim, value in lessons.settled(notebook).items()}
        rows.append(row)
    return rows


def is_number(value: Any) -> bool:
    """Whether a value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def lines(
    rows: Sequence[Row], columns: Sequence[str], parameters: Sequence[str]
) -> tuple[str, Lines]:
    """What to draw of one metric, which has a column for each of its keys: name of the horizontal axis, and the lines.

    The axis is the parameter with most numbers, else the first that varies; for recorded lists it is the entry.
    """
    values = {name: list(dict.fromkeys(row[name] for row in rows)) for name in parameters}
    varying = [name for name in parameters if len(values[name]) > 1] or list(parameters[:1])
    axis = max(varying, key=lambda name: all(map(is_number, values[name])) * len(values[name]))
    found: Lines = {}
    for row in rows:
        for column in columns:
            value, names = row.get(column), [name for name in varying if name != axis]
            points = {row[axis]: value} if is_number(value) else {}
            if isinstance(value, list) and value and all(map(is_number, value)):
                axis, names, points = "entry", varying, dict(enumerate(value, 1))
            label = ", ".join(
                filter(None, [column.partition(".")[2], *(f"{name}={row[name]}" for name in names)])
            )
            if points:
                found.setdefault(label, {}).update(points)
    return axis, found


def plot(metric: str, axis: str, found: Lines) -> str:
    """One metric as an HTML image that holds its own data."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from amp_utils import plots

    ticks = list(dict.fromkeys(place for points in found.values() for place in points))
    heights = [height for points in found.values() for height in points.values()]
    numbers = all(map(is_number, ticks))
    with rc_context(plots.STYLE):
        figure = Figure(figsize=(7, max(2.8, 0.25 * len(found))))
        axes = figure.subplots()
        for i, (label, points) in enumerate(found.items()):
            formats = [word for word in re.split("[=, ]+", label) if word in plots.COLORS]
            axes.plot(
                [place if numbers else str(place) for place in points],
                list(points.values()),
                color=plots.COLORS[formats[0]] if formats else plots.CYCLE[i % len(plots.CYCLE)],
                linestyle=plots.LINES[i % len(plots.LINES)] if numbers else "",
                marker="o" if len(ticks) < 20 else "",
                label=label,
            )
        if numbers and len(ticks) < 9:
            axes.set_xscale("log" if min(ticks) > 0 and max(ticks) > 8 * min(ticks) else "linear")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        axes.set_yscale(
            "log" if min(heights) > 0 and max(heights) > 50 * min(heights) else "linear"
        )
        axes.set(title=metric, xlabel=axis)
        if any(found):
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    source = base64.b64encode(picture.getvalue()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{source}" alt="{html.escape(f"{metric} by {axis}")}">'
    )


def table(rows: Sequence[Row], columns: Sequence[str], links: Mapping[str, str]) -> str:
    """Some columns of the rows as an HTML table, with the links to each run's notebook in front."""

    def text(value: Any) -> str:
        if isinstance(value, list) and len(value) > 4:
            return f"{len(value)} values"
        return (
            ""
            if value is None
            else f"{value:.4g}"
            if isinstance(value, float)
            else html.escape(str(value))
        )

    breakable = [re.sub(r"(?<=[_.:])", "<wbr>", html.escape(column)) for column in columns]
    heads = "".join(f"<th>{column}</th>" for column in breakable)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{text(row.get(column))}</td>" for column in columns)
        lines.append(f'<tr class="{row["outcome"]}"><td>{links[row["run"]]}</td>{cells}</tr>')
    return (
        f'<div class="wide"><table><tr><th>notebook</th>{heads}</tr>{"".join(lines)}</table></div>'
    )


def write(
    out: Path, lesson: Path, runs: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> tuple[Path, int]:
    """Write results.csv, each notebook as a page, and report.html; returns that and how many runs are finished."""
    rows = read_back(lesson, out, runs, failures)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(out / "results.csv", text.getvalue())

    links = {}
    for name in runs:
        pages = [found for found in [page(lesson, out / name)] if found]
        kinds = {"page": ".html", "ipynb": ".ipynb"}
        addresses = {
            word: quote(f"{name}/{found.stem}{ending}")
            for found in pages
            for word, ending in kinds.items()
        }
        links[name] = ", ".join(
            f'<a href="{address}">{word}</a>' for word, address in addresses.items()
        )
    parameters = list(next(iter(runs.values())))
    claims = [column for column in columns if column.startswith("claim:")]
    shown = [column for column in columns if column not in ["run", *claims]]
    metrics: dict[str, list[str]] = {}
    for column in shown[len(parameters) + 2 :]:
        metrics.setdefault(column.partition(".")[0], []).append(column)
    drawn = {metric: lines(rows, parts, parameters) for metric, parts in metrics.items()}
    finished = sum(row["outcome"] == "done" for row in rows)
    body = [
        f"<p>{finished} of {len(rows)} runs are finished. ",
        'The same table with every digit: <a href="results.csv">results.csv</a>.</p>',
        *(
            f'<p class="failed">{html.escape(f"{name}: {reason}")}</p>'
            for name, reason in failures.items()
        ),
        table(rows, shown, links),
        *(plot(metric, axis, found) for metric, (axis, found) in drawn.items() if found),
        "<h2>Measured for the claims of the sources</h2>" + table(rows, parameters + claims, links)
        if claims
        else "",
    ]
    title = f"Sweep of {html.escape(lesson.stem)}"
    write_whole(out / "report.html", PAGE.format(title=title, body="".join(body)))
    return out / "report.html", finished
