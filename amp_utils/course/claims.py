"""The ledger of claims: what the sources say (notebooks/claims.toml) beside what the lessons
measured (measured.json, each value with the machine, torch version and date of its measurement)."""

import ast
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from amp_utils.course import CourseError, notebook, pages, write_whole
from amp_utils.device import choose_device, describe

SCHEMA = Path(__file__).parent / "templates" / "claims.schema.json"
# An expression, so that the lesson's names and history stay as they are.
EVALUATE = "__import__('amp_utils.course.claims').course.claims.evaluate(lambda raised: ({}))"


class Claim(SimpleNamespace):
    """An entry of claims.toml, whose head explains the fields; claims.schema.json checks them."""

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


def read(notebooks: Path) -> tuple[dict[str, str], list[Claim], dict[str, dict]]:
    """Sources, claims and the values measured so far. Raises CourseError for a bad entry."""
    import jsonschema

    values = notebooks / "measured.json"
    try:
        entries = tomllib.loads((notebooks / "claims.toml").read_text("utf-8"))
        measured = json.loads(values.read_text("utf-8")) if values.exists() else {}
    except ValueError as error:
        raise CourseError(f"claims.toml or measured.json is damaged: {error}.") from None
    schema = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text("utf-8")))
    for error in schema.iter_errors(entries):
        raise CourseError(f"claims.toml, {error.json_path[2:]}: {error.message}.")
    sources = entries.pop("sources")
    for name, fields in entries.items():
        if fields["source"] not in sources:
            raise CourseError(f"claims.toml, {name}: {fields['source']!r} is not among [sources].")
    claims = [Claim(**{"id": name, "ours": False, **fields}) for name, fields in entries.items()]
    return sources, claims, measured


def measure(lesson: Path, claims: Sequence[Claim]) -> tuple[dict[str, Any], list[str]]:
    """Run a lesson and evaluate each claim right after its cell: values by id, and what failed."""
    from amp_utils.course.run import failure  # with papermill, which lessons' kernels do without

    resources = {"metadata": {"path": str(lesson.parent)}}
    quiet = ["--IPKernelApp.log_level=50"]  # no traceback after Ctrl-C
    client = NotebookClient(notebook.read(lesson), resources=resources, extra_arguments=quiet)
    tags = set().union(*map(notebook.tags, client.nb.cells))
    failures = [f"{c.id}: no cell is tagged {c.cell}." for c in claims if c.cell not in tags]
    values = {}
    try:
        with client.setup_kernel():
            for index, cell in enumerate(client.nb.cells):
                client.execute_cell(cell, index)
                here = [claim for claim in claims if claim.cell in notebook.tags(cell)]
                if not here:
                    continue
                wanted = {claim.id: EVALUATE.format(claim.measure) for claim in here}
                request = client.kc.execute("", silent=True, user_expressions=wanted)
                replies = client.wait_for_reply(request)["content"]["user_expressions"]
                for name, reply in replies.items():
                    if reply["status"] == "ok":
                        text = ast.literal_eval(reply["data"]["text/plain"])
                        # JSON has no such numbers as NaN and Infinity: they become words.
                        values[name] = json.loads(text, parse_constant=lambda c: str(float(c)))
                    else:
                        failures.append(f"{name}: {reply['ename']}: {reply['evalue']}")
    except (CellExecutionError, DeadKernelError) as error:
        failures.append(failure(lesson, error))
    return values, failures


def evaluate(measure: Callable[[Callable], Any]) -> str:
    """A claim's value as JSON. Runs in the lesson's kernel and leaves its random numbers alone."""

    def raised(function: Callable[[], Any]) -> str:
        try:
            function()
        except Exception as error:  # a claim may be about any error
            return f"{type(error).__name__}: {error}"
        return ""

    with torch.random.fork_rng():
        return json.dumps(measure(raised))


def publish(notebooks: Path, measured: dict[str, dict]) -> list[str]:
    """Write measured.json, claims.md and claims.html; returns what contradicts its verdict."""
    sources, claims, _ = read(notebooks)
    known = {claim.id: measured[claim.id] for claim in claims if claim.id in measured}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in known.items())
    write_whole(notebooks / "measured.json", "{\n" + ",\n".join(lines) + "\n}\n")
    origins = {k: f"{e['date']}, torch {e['torch']}, {e['machine']}" for k, e in known.items()}
    runs = sorted(set(origins.values()))
    numbers = {name: runs.index(origin) + 1 for name, origin in origins.items()}
    rows = [(c, known.get(c.id, {}).get("value"), numbers.get(c.id, "–")) for c in claims]
    for name, templates in {"claims.html": pages.TEMPLATES, "claims.md": pages.MARKDOWN}.items():
        template = templates.get_template(f"{name}.j2")
        text = template.render(claims=rows, runs=runs, sources=sources)
        write_whole(notebooks / name, text.strip() + "\n")
    return [wrong for claim, value, _ in rows if (wrong := claim.contradiction(value))]


@click.command(help="Measure the claims of LESSONs (all where none is given); write the ledger.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option("--render", is_flag=True, help="measure nothing: render the committed values again")
@click.pass_obj
def command(root: Path, lessons: tuple[str, ...], render: bool) -> int:
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
