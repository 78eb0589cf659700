"""The ledger of claims: what the sources say beside what the lessons measured.

notebooks/claims.toml says what is claimed and how to measure it; notebooks/measured.json keeps each
value with the machine, torch version and date of its own measurement. claims.md and claims.html are
rendered from these two.
"""

import ast
import json
import logging
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from amp_utils.course import CourseError, html, notebook, write_whole
from amp_utils.device import choose_device, describe

SCHEMA = Path(__file__).parent / "templates" / "claims.schema.json"
WORDS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}  # JSON has no such numbers
Measured = dict[str, dict[str, Any]]  # by claim: value, machine, torch and date


@dataclass(frozen=True)
class Claim:
    """One entry of claims.toml, whose head explains the fields."""

    id: str
    source: str
    claim: str
    published: Any
    compare: str
    lesson: str
    cell: str
    measure: str
    verdict: str
    tolerance: float | None = None
    ours: bool = False
    truth: str | None = None
    depends_on: str | None = None

    def holds(self, value: Any) -> bool:
        """Whether a measured value stands to the published one as the claim says."""
        if self.compare == "equal":
            return type(value) is type(self.published) and value == self.published
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.compare == "close":
            return math.isclose(value, self.published, rel_tol=self.tolerance)
        return value >= self.published if self.compare == "at least" else value <= self.published

    def contradiction(self, value: Any) -> str | None:
        """A sentence where the verdict cannot stand beside the measured value, else None."""
        if value is None:
            return f"{self.id} was not measured."
        holds = self.holds(value)
        if self.verdict == "depends on hardware" or holds == (self.verdict == "reproduced"):
            return None
        outcome = "holds" if holds else "does not hold"
        return f"{self.id} is said to be {self.verdict!r}, but with {value!r} the claim {outcome}."


def read(notebooks: Path) -> tuple[dict[str, str], list[Claim], Measured]:
    """Sources, claims and the values measured so far. Raises CourseError for a bad entry."""
    import jsonschema

    entries = _parsed(notebooks / "claims.toml", tomllib.loads)
    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text("utf-8")))
    for error in schema.iter_errors(entries):
        raise CourseError(f"claims.toml, {error.json_path[2:]}: {error.message}.")
    sources = entries.pop("sources")
    claims = [Claim(name, **fields) for name, fields in entries.items()]
    for claim in claims:
        if claim.source not in sources:
            allowed = f"give one of {', '.join(sources)}"
            raise CourseError(f"{claim.id}: source = {claim.source!r} is not allowed: {allowed}.")
    values = notebooks / "measured.json"
    return sources, claims, _parsed(values, json.loads) if values.exists() else {}


def _parsed(path: Path, parse: Callable[[str], dict]) -> dict:
    try:
        return parse(path.read_text("utf-8"))
    except ValueError as error:
        raise CourseError(f"{path} is damaged: {error}.") from None


def measure(lesson: Path, claims: Sequence[Claim]) -> tuple[dict[str, Any], list[str]]:
    """Run a lesson and evaluate each claim right after its cell: values by id, and what failed."""
    client = NotebookClient(
        notebook.read(lesson),
        resources={"metadata": {"path": str(lesson.parent)}},
        extra_arguments=["--IPKernelApp.log_level=50"],  # no traceback after Ctrl-C
    )
    tags = set().union(*map(notebook.tags, client.nb.cells))
    missing = [claim for claim in claims if claim.cell not in tags]
    failures = [f"{claim.id}: {lesson.stem} has no cell tagged {claim.cell}." for claim in missing]
    values: dict[str, Any] = {}
    try:
        with client.setup_kernel():
            for index, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, index)
                for claim in claims:
                    if claim.cell in notebook.tags(cell):
                        try:
                            values[claim.id] = _value(client, claim)
                        except CourseError as error:
                            failures.append(str(error))
    except CellExecutionError as error:
        failures.append(f"{lesson.stem} stopped: {error.ename}: {error.evalue}".splitlines()[0])
    except DeadKernelError:
        failures.append(f"{lesson.stem}: the kernel died, most often for lack of memory.")
    return values, failures


def _value(client: NotebookClient, claim: Claim) -> Any:
    prepare = "from amp_utils.course.claims import evaluate as _evaluate"
    wanted = {claim.id: f"_evaluate(lambda raised: ({claim.measure}))"}
    request = client.kc.execute(prepare, silent=True, user_expressions=wanted)
    reply = client.wait_for_reply(request)["content"]["user_expressions"][claim.id]
    if reply["status"] != "ok":
        raise CourseError(f"{claim.id}: {reply['ename']}: {reply['evalue']}")
    return json.loads(ast.literal_eval(reply["data"]["text/plain"]), parse_constant=WORDS.get)


def evaluate(function: Callable[[Callable], Any]) -> str:
    """A claim's value as JSON. Runs in the lesson's kernel and leaves its random numbers alone."""
    with torch.random.fork_rng():
        return json.dumps(function(_raised))


def _raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:  # a claim may be about any error
        return f"{type(error).__name__}: {error}"
    return ""


def publish(notebooks: Path, measured: Measured) -> list[str]:
    """Write measured.json, claims.md and claims.html; returns what contradicts its verdict."""
    sources, claims, _ = read(notebooks)
    known = {claim.id: measured[claim.id] for claim in claims if claim.id in measured}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in known.items())
    write_whole(notebooks / "measured.json", "{\n" + ",\n".join(lines) + "\n}\n")
    origins = {name: (e["date"], f"torch {e['torch']}", e["machine"]) for name, e in known.items()}
    runs = sorted(set(origins.values()))
    rows, wrong = [], []
    for claim in claims:
        value = known[claim.id]["value"] if claim.id in known else None
        rows.append((claim, value, runs.index(origins[claim.id]) + 1 if claim.id in known else "–"))
        wrong += filter(None, [claim.contradiction(value)])
    pages = {"claims.html": html.TEMPLATES, "claims.md": html.TEMPLATES.overlay(autoescape=False)}
    for name, templates in pages.items():
        text = templates.get_template(f"{name}.j2").render(claims=rows, runs=runs, sources=sources)
        write_whole(notebooks / name, text.strip() + "\n")
    return wrong


@click.command(help="Measure the claims of LESSONs (all where none is given); write the ledger.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option("--render", is_flag=True, help="measure nothing: render the committed values again")
@click.pass_obj
def command(root: Path, lessons: tuple[str, ...], render: bool) -> int:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of a cell that Ctrl-C ends
    notebooks, failures = root / "notebooks", []
    _, claims, measured = read(notebooks)
    origin = {"machine": describe(choose_device()), "torch": torch.__version__}
    for lesson in [] if render else notebook.choose(lessons, notebooks):
        if here := [claim for claim in claims if claim.lesson == lesson.stem]:
            values, failed = measure(lesson, here)
            origin["date"] = date.today().isoformat()
            measured |= {name: {"value": value, **origin} for name, value in values.items()}
            publish(notebooks, measured)  # now, so that a later failure or Ctrl-C loses nothing
            click.echo(f"{lesson.stem}: {len(values)} of {len(here)} claims measured")
            failures += failed
    failures += publish(notebooks, measured)
    click.echo(f"{len(claims)} claims: see notebooks/claims.md and notebooks/claims.html.")
    click.echo("\n".join(failures), err=True, nl=bool(failures))
    return 1 if failures else 0
