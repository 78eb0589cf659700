"""Read a sweep's notebooks back, into a table and a page that needs nothing but its folder."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from amp_utils import lesson as lessons
from amp_utils import plots
from amp_utils.course import CourseError, notebook, pages, write_whole
from amp_utils.lesson import is_number

Row = dict[str, Any]
Runs = Mapping[str, Mapping[str, Any]]  # parameters by name


def page(lesson: Path, folder: Path) -> Path | None:
    """The notebook that a run has left, finished or failed, as an HTML page that is up to date."""
    left = folder / lesson.name, folder / f"{lesson.stem}.failed.ipynb"
    for source in filter(Path.exists, left):
        target = source.with_suffix(".html")
        if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
            try:
                body = pages.cells(notebook.read(source), lesson.parent)
            except CourseError as error:  # of a picture or formula: the report goes on without
                body = escape(str(error))
            title = f"{folder.name} · {lesson.stem}"
            write_whole(target, pages.page("lesson.html.j2", title=title, body=body))
        return target
    return None


def flat(results: Mapping[str, Any], words: Sequence[Any] = ()) -> Iterator[tuple[str, Any]]:
    """Name and value of each single result; dots join the names of nested ones.

    A lone nested result named like one of the run's parameter values (`words`) loses its name:

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


def read_back(lesson: Path, out: Path, runs: Runs, failures: Mapping[str, str]) -> list[Row]:
    """A row for each run: name, parameters, outcome, seconds, then what the lesson recorded."""
    rows = []
    for name, parameters in runs.items():
        outcome = "failed" if name in failures else "missing"
        row = {"run": name, **parameters, "outcome": outcome, "took (s)": None}
        if (out / name / lesson.name).exists():
            run = notebook.read(out / name / lesson.name)
            row |= {"outcome": "done", "took (s)": round(run.metadata.papermill.duration, 1)}
            results = dict(flat(lessons.recorded(run), list(parameters.values())))
            row |= {f"recorded {key}" if key in row else key: results[key] for key in results}
        rows.append(row)
    return rows


def lines(rows: list[Row], columns: list[str], parameters: list[str]) -> dict[tuple[str, str], Any]:
    """What to plot, as {(metric, name of the x-axis): {label: {x: y}}}.

    The x-axis is the parameter with the most numbers, else the first that varies; of a list, it is
    the position in the list, the "entry".
    """
    values = {name: {row[name] for row in rows} for name in parameters}
    varying = [name for name in parameters if len(values[name]) > 1] or parameters[:1]
    widest = max(varying, key=lambda name: all(map(is_number, values[name])) * len(values[name]))
    found: dict[tuple[str, str], Any] = {}
    for column, row in product(columns, rows):
        metric, _, part = column.partition(".")
        axis, points = widest, {row[widest]: row.get(column)}
        if isinstance(row.get(column), list):
            axis, points = "entry", dict(enumerate(row[column], 1))
        if points and all(map(is_number, points.values())):
            settings = [f"{name}={row[name]}" for name in varying if name != axis]
            label = ", ".join(filter(None, [part, *settings]))
            found.setdefault((metric, axis), {}).setdefault(label, {}).update(points)
    return found


def plot(metric: str, axis: str, found: Mapping[str, Mapping[Any, float]]) -> str:
    """One metric as an SVG picture, with words or few numbers evenly spaced on the x-axis."""
    places = list(dict.fromkeys(place for points in found.values() for place in points))
    heights = [height for points in found.values() for height in points.values()]
    numbers = all(map(is_number, places))
    spaced = len(places) < 9 or not numbers
    with rc_context(plots.STYLE):
        figure = Figure(figsize=(7, max(2.8, 0.25 * len(found))))
        axes = figure.subplots()
        for i, (label, points) in enumerate(found.items()):
            xs = map(places.index, points) if spaced else points
            color = next((plots.COLORS[f] for f in plots.COLORS if f in label), plots.CYCLE[i % 6])
            style, marker = plots.LINES[i % 6] if numbers else "", "o" if spaced else ""
            look = {"color": color, "linestyle": style, "marker": marker}
            axes.plot([*xs], [*points.values()], label=label, **look)
        if spaced:
            axes.set_xticks(range(len(places)), map(str, places))
        log = min(heights) > 0 and max(heights) > 50 * min(heights)
        axes.set(title=metric, xlabel=axis, yscale="log" if log else "linear")
        if any(found):
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def brief(value: Any) -> str:
    """A value for a cell of the table; results.csv has every digit."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write(out: Path, lesson: Path, runs: Runs, failures: Mapping[str, str]) -> int:
    """Write results.csv, a page for each run, and report.html; returns how many runs are done."""
    rows = read_back(lesson, out, runs, failures)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(out / "results.csv", text.getvalue())

    parameters = list(next(iter(runs.values())))
    drawn = lines(rows, columns[len(parameters) + 3 :], parameters)
    report = {
        "title": f"Sweep of {lesson.stem}",
        "finished": sum(row["outcome"] == "done" for row in rows),
        "rows": rows,
        "columns": columns[1:],
        "brief": brief,
        "pages": {name: page(lesson, out / name) for name in runs},
        "failures": failures,
        "plots": [(*name, plot(*name, found)) for name, found in drawn.items()],
    }
    write_whole(out / "report.html", pages.page("report.html.j2", **report))
    return report["finished"]
