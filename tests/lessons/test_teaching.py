"""TEACHING.md has two plans for every part, and the mistaken belief behind every prediction."""

import re
from pathlib import Path

import nbformat
from support.each import each

from amp_utils.course import notebook

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "TEACHING.md").read_text("utf-8")
WRITTEN = {path.stem for path in notebook.lessons(ROOT / "notebooks")}
PARTS = {
    part: [name for name in names if name in WRITTEN] for part, names in notebook.PARTS.items()
}
PARTS = {part: names for part, names in PARTS.items() if names}


def section(part: str) -> str:
    return re.split(r"^## ", TEXT.split(f"\n## {part}\n")[1], flags=re.M)[0]


def test_every_part_is_there_in_order():
    assert re.findall(r"^## (.+)$", TEXT, re.M) == [*PARTS, "The classroom"]


@each("part", PARTS)
def test_the_minutes_of_both_plans_add_up(part):
    plans = re.findall(
        r"^\| minutes \| (\d+)-minute plan \|\n\| ---: \| --- \|\n((?:\|.+\n)+)",
        section(part),
        re.M,
    )
    assert [minutes for minutes, _ in plans] == ["50", "90"]
    for minutes, rows in plans:
        assert sum(int(row) for row in re.findall(r"^\| (\d+) \|", rows, re.M)) == int(minutes)
        assert rows.count("\n") == len(re.findall(r"^\| \d+ \|", rows, re.M))


@each("part", PARTS)
def test_every_prediction_has_the_belief_it_is_aimed_at(part):
    assert "**Show live:**" in section(part)
    table = section(part).split("| lesson | prediction | the mistaken belief |")[1]
    rows = re.findall(r"^\| (\w+) \| \S.+ \| that .+ \|$", table, re.M)
    expected = []
    for name in PARTS[part]:
        cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", 4).cells
        asked = sum("predict" in cell.metadata.get("tags", []) for cell in cells)
        expected += [name.split("_")[0].lstrip("0") or "0"] * asked
    assert rows == expected, f"{part}: a row for each prediction, in the order of the lessons"


@each("part", PARTS)
def test_every_lesson_is_linked_and_every_link_leads_somewhere(part):
    links = re.findall(r"\]\(([^)]+)\)", section(part))
    linked = {Path(link).stem for link in links if link.startswith("notebooks/")}
    assert set(PARTS[part]) <= linked
    for link in links:
        assert link == "#appendices" or (ROOT / link.split("#")[0]).is_file()
