"""Read a sweep's notebooks back: a table as CSV, and a page with the table, plots and notebooks.

The page needs nothing but its folder, so it can be read offline and moved.
"""

import base64
import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import escape
from matplotlib import rc_context
from matplotlib.figure import Figure

from amp_utils import lesson as lessons
from amp_utils import plots
from amp_utils.course import CourseError, html, notebook, pages, write_whole

Row = dict[str, Any]
Lines = dict[str, dict[Any, float]]  # y by x, by label


def outward(url: str) -> str:
    """Keep anchors and web links; drop those to other lessons, which are not next to a run."""
    return url if url.startswith("#") or "://" in url else ""


def page(lesson: Path, folder: Path) -> Path | None:
    """The notebook that a run has left, finished or failed, as an HTML page that is up to date."""
    candidates = folder / lesson.name, folder / f"{lesson.stem}.failed.ipynb"
    source = next(filter(Path.exists, candidates), None)
    if source is None:
        return None
    target = source.with_suffix(".html")
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        try:
            body = pages.cells(notebook.read(source), lesson.parent, outward)
        except CourseError as error:  # of a picture or formula: the report goes on without
            body = escape(str(error))
        write_whole(target, pages.page(f"{folder.name} · {lesson.stem}", body))
    return target


def flat(results: Mapping[str, Any], words: Sequence[Any] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of each single result; dots join the names of nested ones.

    A lone nested result named like one of the run's own parameter values (`words`) loses its name:

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
    """A row for each run: name, parameters, outcome, seconds, then what the lesson recorded."""
    rows = []
    for name, parameters in runs.items():
        outcome = "failed" if name in failures else "missing"
        row: Row = {"run": name, **parameters, "outcome": outcome, "took (s)": None}
        if (out / name / lesson.name).exists():
            run = notebook.read(out / name / lesson.name)
            row |= {"outcome": "done", "took (s)": round(run.metadata.papermill.duration, 1)}
            results = dict(flat(lessons.recorded(run), list(parameters.values())))
            row |= {f"recorded {key}" if key in row else key: results[key] for key in results}
        rows.append(row)
    return rows


def is_number(value: Any) -> bool:
    """Whether a value can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def lines(
    rows: Sequence[Row], columns: Sequence[str], parameters: Sequence[str]
) -> tuple[str, Lines]:
    """Return the x-axis name and the lines to plot for one metric, which has several columns.

    The x-axis is the parameter with the most numbers, else the first that varies. Where any value
    is a list, it is the position in the list, and single numbers are not drawn.
    """
    values = {name: list(dict.fromkeys(row[name] for row in rows)) for name in parameters}
    varying = [name for name in parameters if len(values[name]) > 1] or list(parameters[:1])
    axis = max(varying, key=lambda name: all(map(is_number, values[name])) * len(values[name]))
    lists = any(isinstance(row.get(column), list) for row in rows for column in columns)
    axis = "entry" if lists else axis
    found: Lines = {}
    for row in rows:
        for column in columns:
            value = row.get(column)
            if lists:
                points = dict(enumerate(value, 1)) if isinstance(value, list) else {}
            else:
                points = {row[axis]: value}
            settings = [f"{name}={row[name]}" for name in varying if name != axis]
            label = ", ".join(filter(None, [column.partition(".")[2], *settings]))
            if points and all(map(is_number, points.values())):
                found.setdefault(label, {}).update(points)
    return axis, found


def plot(metric: str, axis: str, found: Lines) -> str:
    """One metric as an SVG picture, in base64."""
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
        log = min(heights) > 0 and max(heights) > 50 * min(heights)
        axes.set_yscale("log" if log else "linear")
        axes.set(title=metric, xlabel=axis)
        if any(found):
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return base64.b64encode(picture.getvalue()).decode()


def brief(value: Any) -> str:
    """A value for a cell of the table; results.csv has every digit."""
    if isinstance(value, list) and len(value) > 4:
        return f"{len(value)} values"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write(
    out: Path, lesson: Path, runs: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> tuple[Path, int]:
    """Write results.csv, each notebook as a page, and report.html.

    Returns the path of the report and how many runs are finished.
    """
    rows = read_back(lesson, out, runs, failures)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(out / "results.csv", text.getvalue())

    parameters = list(next(iter(runs.values())))
    metrics: dict[tuple[str, bool], list[str]] = {}
    for column in columns[len(parameters) + 3 :]:
        kind = any(isinstance(row.get(column), list) for row in rows)
        metrics.setdefault((column.partition(".")[0], kind), []).append(column)
    drawn = [(metric, *lines(rows, group, parameters)) for (metric, _), group in metrics.items()]
    found = {name: page(lesson, out / name) for name in runs}
    report = html.page(
        "report.html.j2",
        title=f"Sweep of {lesson.stem}",
        rows=rows,
        columns=columns[1:],
        cells=[[brief(row.get(column)) for column in columns[1:]] for row in rows],
        links={name: f"{name}/{path.stem}" for name, path in found.items() if path},
        failures=failures,
        plots=[(metric, axis, plot(metric, axis, shown)) for metric, axis, shown in drawn if shown],
    )
    write_whole(out / "report.html", report)
    return out / "report.html", sum(row["outcome"] == "done" for row in rows)
