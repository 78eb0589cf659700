"""The ledger of claims: what the sources say (notebooks/claims.toml) beside what the lessons
measured (measured.json: every claim's value on each machine, with torch version and date)."""

import ast
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from amp_utils.course import CourseError, kernel, notebook, pages, write_whole
from amp_utils.course.cells import decoded
from amp_utils.device import choose_device, describe
from amp_utils.lesson import is_number

SCHEMA = Path(__file__).parent / "templates" / "claims.schema.json"
# An expression, so that the lesson's names and history stay as they are.
EVALUATE = "__import__('amp_utils.course.cells').course.cells.evaluate(lambda raised: ({}))"
HOLDING = ("reproduced", "computed", "consistent with", "checked")


class Claim(SimpleNamespace):
    """A claim or check of claims.toml, whose head explains the fields; the schema checks them."""

    def holds(self, value: Any) -> bool:
        """Whether a measured value stands to the expected one as the claim says."""
        if self.compare == "equal":
            return type(value) is type(self.expected) and value == self.expected
        if not is_number(value):
            return False
        if self.compare == "close":
            return math.isclose(value, self.expected, rel_tol=self.tolerance)
        return value >= self.expected if self.compare == "at least" else value <= self.expected

    def contradiction(self, measured: Mapping[str, dict]) -> str | None:
        """A sentence where the verdict cannot stand beside the values by machine, else None.

        The value null says that this machine cannot measure the claim.
        """
        values = {m: e["value"] for m, e in measured.items() if e["value"] is not None}
        varies = self.verdict == "depends on hardware"
        if not (measured if varies else values) and self.measure:
            return f"{self.id} was not measured."
        for machine, value in values.items():
            holds = self.holds(value)
            if not (is_number(value) if varies else holds == (self.verdict in HOLDING)):
                outcome = f"with {value!r} it {'holds' if holds else 'does not hold'}"
                return f"{self.id} is said to be {self.verdict!r}, but {outcome} ({machine})."
        return None

    def standing(self, measured: Mapping[str, dict]) -> str:
        """The verdict, or "not measurable here" until some machine has a value for the claim."""
        unknown = all(entry["value"] is None for entry in measured.values())
        varies = self.verdict == "depends on hardware"
        return "not measurable here" if varies and unknown else self.verdict


def read(notebooks: Path) -> SimpleNamespace:
    """Sources, questions, claims (checks among them) and measured values by id and machine.

    Raises CourseError for a bad entry.
    """
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
    checks = {name: {"verdict": "checked"} | e for name, e in entries.pop("checks", {}).items()}
    for name, entry in entries["claims"].items():
        for field in ("source", "question"):
            if entry[field] not in entries[f"{field}s"]:
                raise CourseError(f"claims.toml, {name}: {entry[field]!r} is not in [{field}s].")
        if name in checks:
            raise CourseError(f"claims.toml: {name} is a claim and a check.")
    both = entries.pop("claims") | checks
    optional = dict.fromkeys(
        ("number", "basis", "lesson", "cell", "measure", "because", "until", "surprise")
    )
    claims = [Claim(**{"id": name, **optional, **entry}) for name, entry in both.items()]
    return SimpleNamespace(**entries, claims=claims, measured=measured)


def measure(lesson: Path, claims: Sequence[Claim]) -> tuple[dict[str, Any], list[str]]:
    """Run a lesson to its last claim, each evaluated after its cell: values by id, what failed."""
    from amp_utils.course.run import failure  # with papermill, which lessons' kernels do without

    resources = {"metadata": {"path": str(lesson.parent)}}
    client = NotebookClient(
        notebook.read(lesson),
        resources=resources,
        startup_timeout=300,  # a crowded machine may need more than nbclient's minute
        **kernel.OPTIONS,
    )
    shown = [[c for c in claims if c.cell in notebook.tags(cell)] for cell in client.nb.cells]
    found = [claim for here in shown for claim in here]
    failures = [f"{c.id}: no cell is tagged {c.cell}." for c in claims if c not in found]
    while shown and not shown[-1]:
        shown.pop()
    values = {}
    try:
        with client.setup_kernel():
            for index, here in enumerate(shown):
                client.execute_cell(client.nb.cells[index], index)
                if not here:
                    continue
                request = client.kc.execute("", silent=True, user_expressions=expressions(here))
                measured, failed = answers(client.wait_for_reply(request))
                values |= measured
                failures += failed
    except (CellExecutionError, DeadKernelError) as error:
        failures.append(failure(lesson, error))
    return values, failures


def expressions(claims: Sequence[Claim]) -> dict[str, str]:
    """What a kernel is asked right after a cell with these claims: an expression by id."""
    return {claim.id: EVALUATE.format(claim.measure) for claim in claims}


def answers(reply: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a kernel's reply says to `expressions`: values by id, and what failed."""
    values, failures = {}, []
    for name, answer in reply["content"]["user_expressions"].items():
        if answer["status"] == "ok":
            values[name] = decoded(ast.literal_eval(answer["data"]["text/plain"]))
        else:
            failures.append(f"{name}: {answer['ename']}: {answer['evalue']}")
    return values, failures


def adopt(notebooks: Path, values: Mapping[str, Any], **origin: str) -> list[str]:
    """Put values by claim into the column of `origin`: machine, torch, date. Returns as publish."""
    measured, machine = read(notebooks).measured, origin.pop("machine")
    for name, value in values.items():
        measured.setdefault(name, {})[machine] = {"value": value, **origin}
    return publish(notebooks, measured)


def shown(notebooks: Path) -> dict[str, Any]:
    """What the ledger shows, as Markdown and as a page: the values of the templates claims.*.j2."""
    ledger = read(notebooks)
    values = ledger.measured.values()
    origins = [
        (m, f"{e['date']}, torch {e['torch']}") for value in values for m, e in value.items()
    ]
    cells = {
        (path.stem, tag): cell.id
        for path in notebook.lessons(notebooks)
        for cell in notebook.cells(path)
        for tag in cell.tags
    }
    for claim in ledger.claims:
        claim.measured = ledger.measured.get(claim.id, {})
        claim.shown = claim.standing(claim.measured)
        claim.anchor = f"#cell-id={cells.get((claim.lesson, claim.cell))}"
    return {
        "claims": [c for c in ledger.claims if c.verdict != "checked"],
        "checks": [c for c in ledger.claims if c.verdict == "checked"],
        "machines": list(dict.fromkeys(machine for machine, _ in origins)),
        "runs": list(dict.fromkeys(origins)),
        "sources": ledger.sources,
        "questions": ledger.questions,
    }


def publish(notebooks: Path, measured: dict[str, dict]) -> list[str]:
    """Write measured.json and claims.md; returns what contradicts its verdict."""
    known = {c.id: measured[c.id] for c in read(notebooks).claims if c.measure and c.id in measured}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in known.items())
    write_whole(notebooks / "measured.json", "{\n" + ",\n".join(lines) + "\n}\n")
    values = shown(notebooks)
    text = pages.MARKDOWN.get_template("claims.md.j2").render(values)
    write_whole(notebooks / "claims.md", text.strip() + "\n")
    both = values["claims"] + values["checks"]
    return [wrong for claim in both if (wrong := claim.contradiction(claim.measured))]


@click.command(help="Measure the claims of LESSONs (all where none is given); write the ledger.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option("--render", is_flag=True, help="measure nothing: render the committed values again")
@click.pass_obj
def command(root: Path, lessons: tuple[str, ...], render: bool) -> int:
    notebooks, failures = root / "notebooks", []
    claims = read(notebooks).claims
    origin = {"machine": describe(choose_device()), "torch": torch.__version__}
    for lesson in [] if render else notebook.choose(lessons, notebooks):
        if here := [claim for claim in claims if claim.lesson == lesson.stem]:
            values, failed = measure(lesson, here)
            # Now, so that a later failure or Ctrl-C loses nothing.
            adopt(notebooks, values, **origin, date=date.today().isoformat())
            click.echo(f"{lesson.stem}: {len(values)} of {len(here)} claims measured")
            failures += failed
    failures += publish(notebooks, read(notebooks).measured)
    click.echo(f"{len(claims)} claims: see notebooks/claims.md.")
    click.echo("\n".join(failures), err=True, nl=bool(failures))
    return 1 if failures else 0
