"""Everything that wants a GPU in one command, with torch, matplotlib and click alone.

`gpu.toml` says in which order: what is worth most comes first, and `results.json` is written after
each step, so that a run that is cut off has still brought the most.
"""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from amp_utils.course import CourseError, notebook, shown, write_whole
from amp_utils.device import choose_device, describe

PLAN = tomllib.loads(Path(__file__).with_name("gpu.toml").read_text("utf-8"))
CHILD = "amp_utils.course.cells"
MINUTES = click.FloatRange(0, min_open=True)
LEAST = 5  # seconds without which no step begins
SHRINKS = 4  # a lesson that has run out of memory is tried at half its sizes so many times


def run_limited(*command: str, limit: float, **environment: str) -> tuple[int | None, str]:
    """Run a Python module in a group of its own, which ends with it; its status and last line.

    The status is None where the time limit ended it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        said, status = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        said, status = "", None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # workers and ranks that were left
        except ProcessLookupError:
            pass
        process.communicate()
    return status, " ".join(said.strip().splitlines()[-1:])


def try_lesson(path: Path, out: Path, device: str, limit: float) -> dict[str, Any]:
    """Run a lesson in a process of its own; without enough memory again, at half its sizes."""
    number, executed = path.stem.split("_")[0], out / path.name
    parameters = {"device": device}
    for shrink in range(SHRINKS + 1):
        executed.unlink(missing_ok=True)
        begin = time.perf_counter()
        told = str(path), str(executed), json.dumps(parameters)
        status, last = run_limited(CHILD, *told, limit=limit, MPLBACKEND="agg")
        row = {"lesson": path.stem, "parameters": parameters, "cells": 0}
        if executed.exists():
            row |= json.loads(executed.read_bytes())["metadata"]["amp_utils"]
        row["seconds"] = round(time.perf_counter() - begin, 1)
        if status is None:
            row["error"] = f"stopped after {limit:.0f} s, {row['cells']} cells were done"
        elif status:  # the process did not come to the end of its own reporting
            row["error"] = f"exit status {status}: {last}"
        limit -= row["seconds"]
        if "OutOfMemoryError" not in (row["error"] or "") or number not in PLAN["shrink"]:
            break
        smaller = {k: v >> (shrink + 1) for k, v in PLAN["shrink"][number].items()}
        parameters = parameters | smaller
    return row


def try_bench(pairs: Sequence[str], root: Path, device: str, limit: float) -> dict[str, Any]:
    """Run benchmarks; the row has their `results` and `tables` if they came to an end."""
    told = "--root", str(root), "bench", "--device", device, "--patience", "0.3", *pairs
    begin, path = time.perf_counter(), root / "runs" / f"bench-{device}.json"
    path.unlink(missing_ok=True)
    status, last = run_limited("amp_utils.course", *told, limit=limit)
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    error = None  # a bar that is not kept is no failure here
    if status is None:
        error = f"stopped after {limit:.0f} s"
    elif status and not kept.get("results"):
        error = f"exit status {status}: {last}"
    row = {"lesson": f"bench {' '.join(pairs)}", "error": error, "parameters": {}, "cells": 0}
    return row | {"seconds": round(time.perf_counter() - begin, 1), "bench": kept}


def about(device: torch.device) -> dict[str, str]:
    """Where the values come from: the machine, the driver, versions and the date."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.check_output(query, text=True, stderr=subprocess.DEVNULL).split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "none"
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "driver": driver}
    return {"machine": describe(device), **versions, "date": str(date.today())}


def summary(results: Mapping[str, Any]) -> str:
    """The table of a run, as Markdown."""
    origin, gib = results["about"], 2**30
    lines = [f"{name}: {value}" for name, value in origin.items()]
    lines += [
        "",
        "| step | outcome | seconds | peak, GiB | sizes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        sizes = ", ".join(f"{k}={v}" for k, v in row["parameters"].items() if k != "device")
        outcome = str(row["error"] or "passed").replace("|", "\\|").splitlines()[0]
        cells = row["lesson"], outcome, row["seconds"], f"{row.get('peak', 0) / gib:.2f}", sizes
        lines.append(f"| {' | '.join(map(str, cells))} |")
    tables = [text for row in results["rows"] for text in row.get("bench", {}).get("tables", [])]
    printed = [f"\n```\n{text.strip()}\n```" for text in tables]
    return "\n".join([*lines, "", benchmarks(results), *printed]).strip() + "\n"


def benchmarks(results: Mapping[str, Any]) -> str:
    """The ratios that the benchmarks measured, as Markdown."""
    lines = ["| ratio | median | 95% interval |", "| --- | --- | --- |"]
    for row in results["rows"]:
        for result in row.get("bench", {}).get("results", []):
            low, high = result["interval"]
            middle = median(result["values"])
            lines.append(f"| {result['name']} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)


def adopt(root: Path, folder: Path) -> int:
    """Put a run's values into the ledger and the README, and make pages of its lessons."""
    from amp_utils.course import claims, outline, pages

    try:
        results = json.loads((folder / "results.json").read_bytes())
        origin = {name: results["about"][name] for name in ("machine", "torch", "date")}
    except (OSError, ValueError, LookupError, TypeError):
        raise CourseError(f"{shown(folder)} holds no results.json of `gpu`.", 2) from None
    values = {k: v for row in results["rows"] for k, v in row.get("claims", {}).items()}
    readme = root / "README.md"
    machine, version, day = origin.values()
    text = outline.with_table(
        readme, "GPU", f"{machine}, torch {version}, {day}:\n\n{benchmarks(results)}"
    )
    wrong = claims.adopt(root / "notebooks", values, **origin)
    write_whole(readme, text)
    (folder / "pages").mkdir(exist_ok=True)
    for path in sorted(folder.glob("*.ipynb")):
        lesson = notebook.read(path)
        body = pages.cells(lesson, root / "notebooks", True)
        page = pages.page("lesson.html.j2", title=path.stem, body=body)
        write_whole(folder / "pages" / f"{path.stem}.html", page)
    print(*wrong, f"{len(values)} values of {origin['machine']} are in the ledger.", sep="\n")
    return 0


@click.command(help="Run lessons (all if none is given), benchmarks and claims on a GPU.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu: rehearse")
@click.option("--out", type=Path, metavar="DIR", help="where to write; runs/gpu by default")
@click.option(
    "--minutes", type=MINUTES, default=9, help="for everything; what is left over is named"
)
@click.option("--limit", type=MINUTES, default=1.5, help="minutes for one step")
@click.option("--adopt", "adopted", type=Path, metavar="DIR", help="take a run's values over")
@click.pass_obj
def command(root: Path, lessons, device, out, minutes, limit, adopted) -> int:
    if adopted is not None:
        return adopt(root, adopted)
    device, begin = choose_device(device), time.perf_counter()
    chosen = {
        path.stem.split("_")[0]: path for path in notebook.choose(lessons, root / "notebooks")
    }
    steps = [step for step in PLAN["order"] if step in chosen or (not lessons and " " in step)]
    steps += [number for number in chosen if number not in steps]
    out = (out or root / "runs" / "gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = {"about": about(device), "rows": []}
    for place, step in enumerate(steps, 1):
        left = 60 * minutes - (time.perf_counter() - begin)
        name = chosen[step].stem if step in chosen else step
        if left < LEAST:
            row = {"lesson": name, "error": "no time was left", "parameters": {}, "seconds": 0}
        elif step in chosen:
            row = try_lesson(chosen[step], out, device.type, min(left, 60 * limit))
        else:
            row = try_bench(step.split()[1:], root, device.type, min(left, 60 * limit))
        results["rows"].append(row)
        print(
            f"{place:2}/{len(steps)} {name}: {row['error'] or 'passed'}, {row['seconds']} s",
            flush=True,
        )
        write_whole(out / "results.json", json.dumps(results, indent=1))
        write_whole(out / "table.md", summary(results))
    print(f"See {shown(out)}: table.md, results.json and the lessons.")
    return int(any(row["error"] for row in results["rows"]))
