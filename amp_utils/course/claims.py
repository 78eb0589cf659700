"""The ledger of claims: what the sources say beside what the lessons measured.

python -m amp_utils.course claims           run every lesson that settles a claim, then write notebooks/claims.md and .html
python -m amp_utils.course claims --saved   write them from the outputs that are saved in notebooks/
"""

import html
import math
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import click
import nbformat
import torch

from amp_utils import lesson
from amp_utils.course import run
from amp_utils.course import write_whole as write
from amp_utils.device import choose_device, describe

VERDICTS = {
    "reproduced": None,
    "not true": "truth",
    "depends on hardware": "depends_on",
}  # and what each must add
COMPARISONS = ("equal", "close", "at least", "at most")
TAG = "claim:"


@dataclass(frozen=True)
class Claim:
    """One entry of claims.toml, whose head explains the fields."""

    id: str
    source: str
    claim: str
    published: Any
    compare: str
    lesson: str
    verdict: str
    tolerance: float | None = None  # relative
    ours: bool = False  # the source gives no number: `published` is our bar
    truth: str | None = None
    depends_on: str | None = None

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise ValueError(
                f"{self.id}: compare = {self.compare!r} is not allowed: give one of {COMPARISONS}."
            )
        if self.verdict not in VERDICTS:
            raise ValueError(
                f"{self.id}: verdict = {self.verdict!r} is not allowed: give one of {tuple(VERDICTS)}."
            )
        added = VERDICTS[self.verdict]
        if added and not getattr(self, added):
            raise ValueError(f'{self.id}: a verdict of {self.verdict!r} needs {added} = "…".')
        if (self.compare == "close") != (self.tolerance is not None):
            raise ValueError(
                f"{self.id}: tolerance belongs to compare = 'close', and to nothing else."
            )

    def holds(self, measured: Any) -> bool:
        """Whether `measured` stands to the published value as the claim says."""
        if self.compare == "equal":
            return type(measured) is type(self.published) and measured == self.published
        if not isinstance(measured, int | float) or not math.isfinite(measured):
            return False
        if self.compare == "close":
            return math.isclose(measured, self.published, rel_tol=self.tolerance)
        return (
            measured >= self.published if self.compare == "at least" else measured <= self.published
        )

    def contradiction(self, measured: Any) -> str | None:
        """A sentence where the stated verdict cannot stand beside what was measured, else None."""
        if measured is None:
            return f"{self.id} was not measured."
        if self.verdict == "depends on hardware" or self.holds(measured) == (
            self.verdict == "reproduced"
        ):
            return None
        holds = "holds" if self.holds(measured) else "does not hold"
        return f"{self.id} is said to be {self.verdict!r}, but with {measured!r} the claim {holds}."


def read(path: Path) -> tuple[dict[str, str], list[Claim]]:
    """Sources and claims of a claims.toml. Raises ValueError, in a sentence, for an entry that is not complete."""
    entries = tomllib.loads(path.read_text("utf-8"))
    sources = entries.pop("sources", {})
    claims = []
    for name, fields in entries.items():
        try:
            claims.append(Claim(name, **fields))
        except TypeError as error:
            raise ValueError(f"{name}: {str(error).replace('Claim.__init__() ', '')}.") from error
        if claims[-1].source not in sources:
            raise ValueError(
                f"{name}: source = {claims[-1].source!r} is not one of {', '.join(sources)}."
            )
    return sources, claims


def tagged(notebook: Mapping[str, Any]) -> dict[str, Mapping]:
    """The cell that settles each claim, by id."""
    return {
        tag.removeprefix(TAG): cell
        for cell in notebook["cells"]
        for tag in cell["metadata"].get("tags", [])
        if tag.startswith(TAG)
    }


def shown(value: Any) -> str:
    """A value as the table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def problems(claims: list[Claim], notebooks: Mapping[str, Mapping]) -> list[str]:
    """What does not fit together, in sentences: claims, the cells that settle them, and what these measured.

    `notebooks` are executed lessons (nbformat nodes) by name.
    """
    complaints = []
    cells = {name: tagged(notebook) for name, notebook in notebooks.items()}
    measured = {name: lesson.settled(notebook) for name, notebook in notebooks.items()}
    known = {(claim.lesson, claim.id) for claim in claims}
    for claim in claims:
        cell = cells.get(claim.lesson, {}).get(claim.id)
        if cell is None:
            complaints.append(f"{claim.id} has no cell tagged {TAG}{claim.id} in {claim.lesson}.")
        elif not re.search(rf"lesson\.settle\([^#]*\b{claim.id}=", cell["source"]):
            complaints.append(
                f"{claim.id}: its cell in {claim.lesson} does not call lesson.settle({claim.id}=…)."
            )
        elif wrong := claim.contradiction(measured[claim.lesson].get(claim.id)):
            complaints.append(wrong)
    for name in notebooks:
        for stray in sorted({*cells[name], *measured[name]}):
            if (name, stray) not in known:
                complaints.append(f"{stray} is settled in {name} and is not in claims.toml.")
    return complaints


def rows(claims: list[Claim], measured: Mapping[str, Any]) -> list[list[str]]:
    """A row a claim: lesson, claim, source, published, measured, verdict."""
    words = {"equal": "", "close": "about ", "at least": "at least ", "at most": "at most "}
    table = []
    for c in claims:
        verdict = c.verdict
        if c.verdict == "depends on hardware":
            verdict += f" ({'holds' if c.holds(measured.get(c.id)) else 'does not hold'} here): {c.depends_on}"
        elif c.verdict == "not true":
            verdict += f": {c.truth}"
        wrong = c.contradiction(measured.get(c.id))
        published = ("our bar: " if c.ours else "") + words[c.compare] + shown(c.published)
        here = shown(measured.get(c.id, "–"))
        table.append(
            [
                c.lesson,
                c.claim,
                c.source,
                published,
                here,
                f"CONTRADICTED: {wrong}" if wrong else verdict,
            ]
        )
    return table


HEAD = ["lesson", "claim", "source", "published", "measured here", "verdict"]


def markdown(table: list[list[str]], about: str, sources: Mapping[str, str]) -> str:
    """The table as Markdown, the lessons as links."""
    lines = [
        "# The ledger of claims",
        "",
        about,
        "",
        "| " + " | ".join(HEAD) + " |",
        "| --- " * len(HEAD) + "|",
    ]
    for name, *cells in table:
        cells = [cell.replace("|", "\\|") for cell in cells]
        lines.append("| " + " | ".join([f"[{name.split('_')[0]}]({name}.ipynb)", *cells]) + " |")
    lines += ["", "Sources:", ""] + [f"- *{key}*: {name}" for key, name in sources.items()]
    return "\n".join(lines) + "\n"


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } th, td { text-align: left; vertical-align: top; padding: .35rem .6rem }
tr { border-bottom: 1px solid #ddd } th { position: sticky; top: 0; background: #fff }
.not { background: #fdf0e6 } .depends { background: #eef4fa } .CONTRADICTED { background: #f6c6c6 }
"""


def page(table: list[list[str]], about: str, sources: Mapping[str, str]) -> str:
    """The table as one HTML page that needs nothing else; rows coloured by verdict."""
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    body = ""
    for name, *cells in table:
        kind = cells[-1].split()[0].strip(":")
        cells = [f'<a href="{name}.ipynb">{name.split("_")[0]}</a>', *map(html.escape, cells)]
        body += f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    legend = "".join(
        f"<li><em>{key}</em>: {html.escape(name)}</li>" for key, name in sources.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>The ledger of claims</title><style>{STYLE}</style></head>
<body><h1>The ledger of claims</h1><p>{html.escape(about)}</p>
<table><thead><tr>{head}</tr></thead><tbody>
{body}</tbody></table>
<h2>Sources</h2><ul>{legend}</ul></body></html>
"""


@click.command(
    help="Measure every claim again and write the ledger: notebooks/claims.md and .html."
)
@click.option(
    "--saved", is_flag=True, help="write it from the outputs that are saved in notebooks/"
)
@click.pass_obj
def command(root: Path, saved: bool) -> int:
    notebooks, runs = root / "notebooks", root / "runs"
    sources, claims = read(notebooks / "claims.toml")
    names = sorted({claim.lesson for claim in claims})
    if not saved:
        failed = run.run_all(
            [notebooks / f"{n}.ipynb" for n in names],
            partial(run.run_lesson, runs=runs, parameters={}),
        )
        if failed:
            return 1
    executed = {
        name: nbformat.read((notebooks if saved else runs) / f"{name}.ipynb", 4) for name in names
    }
    measured = {
        key: value
        for notebook in executed.values()
        for key, value in lesson.settled(notebook).items()
    }
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}
    summary = (
        f"{len(claims)} claims: "
        + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + "."
    )
    machine = f"torch {torch.__version__}, {describe(choose_device())}"
    about = f"{summary} Measured on {date.today()} with {machine}, by `make claims`."
    table = rows(claims, measured)
    write(notebooks / "claims.md", markdown(table, about, sources))
    write(notebooks / "claims.html", page(table, about, sources))
    print(f"{summary} See notebooks/claims.md and notebooks/claims.html.")
    complaints = problems(claims, executed)
    for sentence in complaints:
        print(sentence, file=sys.stderr)
    return 1 if complaints else 0
