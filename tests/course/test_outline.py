"""The course map and the navigation follow from the lessons' cards."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amp_utils.course import notebook, outline

ROOT = Path(__file__).parents[2]
CARD = (
    "# 5 · Title\n*Why.*\n\n| | |\n| --- | --- |\n| **You will learn** | 1. a<br>2. b |\n"
    "| **You need** | [1](x.ipynb) |\n| **Minutes** | 40 |\n| **Runs on** | CPU |"
)


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_a_card_is_taken_apart():
    card = outline.read_card(CARD)
    assert (card.title, card.why, card.learn, card.minutes) == (
        "5 · Title",
        "Why.",
        ["a", "b"],
        "40",
    )


@pytest.mark.parametrize("row", ["You will learn", "You need", "Minutes", "Runs on"])
def test_a_missing_row_is_named(row):
    with pytest.raises(ValueError, match=row):
        outline.read_card(CARD.replace(row, "Other"))


def test_everything_generated_is_up_to_date(capsys):
    assert outline.main(ROOT, check=True) == 0, capsys.readouterr().out


def test_a_lesson_links_to_its_neighbours():
    there = notebook.lessons(ROOT / "notebooks")
    for before, after in zip(there, there[1:], strict=False):
        assert f"]({after.name}) →" in outline.navigation(before)
        assert f"]({before.name})" in outline.navigation(after)
    assert "←" not in outline.navigation(there[0]) and "→" not in outline.navigation(there[-1])


def test_both_entrances_lead_to_the_first_lesson_and_one_through_every_appendix(copy):
    def ways():
        rows = outline.entrances(copy / "notebooks").splitlines()[2:]
        return [re.findall(r"\]\((\w+)\.ipynb\)", row) for row in rows]

    there = [path.stem for path in notebook.lessons(copy / "notebooks")]
    appendices = [name for name in there if name.startswith("A")]
    assert appendices and ways() == [[*appendices, "01_float_formats"], ["01_float_formats"]]
    (copy / "notebooks" / f"{appendices[0]}.ipynb").unlink()
    assert ways()[0] == [*appendices[1:], "01_float_formats"]


def test_a_lesson_that_goes_away_leaves_no_link_behind(copy, capsys):
    gone = copy / "notebooks" / "05_gradient_underflow.ipynb"
    gone.unlink()
    assert outline.main(copy, check=True) == 1
    assert outline.main(copy, check=False) == 0
    assert outline.main(copy, check=True) == 0
    assert gone.name not in (copy / "README.md").read_text("utf-8")
    assert "out of date" in capsys.readouterr().out


@pytest.mark.parametrize("marker", [outline.BEGIN, outline.END])
def test_a_readme_without_its_markers_is_left_alone(copy, marker):
    readme = copy / "README.md"
    readme.write_text(readme.read_text("utf-8").replace(marker, ""), "utf-8")
    before = readme.read_bytes()
    with pytest.raises(SystemExit, match="README.md must hold the line"):
        outline.main(copy, check=False)
    assert readme.read_bytes() == before


def test_a_mistyped_option_rewrites_nothing(copy):
    command = [sys.executable, "-m", "amp_utils.course", "outline", "--chek"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("--chek is not allowed: give --check")


def test_what_is_up_to_date_is_not_touched(copy):
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    outline.main(copy, check=False)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
