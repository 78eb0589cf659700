"""What CONTRIBUTING.md tells a newcomer is so: files, commands, and the tags that cells carry."""

import re
from pathlib import Path

from amp_utils.course import __main__, notebook, outline

ROOT = Path(__file__).parents[2]
PAGE = ROOT / ".github" / "CONTRIBUTING.md"
TEXT = PAGE.read_text("utf-8")
TABLE = outline.generated("cell tags", ROOT / "notebooks")


def test_the_table_of_tags_names_those_in_use_and_no_others():
    used = {
        "claim:…" if tag.startswith("claim:") else tag
        for path in notebook.lessons(ROOT / "notebooks")
        for cell in notebook.cells(path)
        for tag in cell.tags
    }
    assert used == set(notebook.TAGS)
    assert TABLE in TEXT
    assert outline.with_table(PAGE, "cell tags", TABLE) == TEXT


def test_a_page_without_its_table_gets_it_back(tmp_path):
    page = tmp_path / PAGE.name
    page.write_text(TEXT.replace(TABLE, "an old table"), "utf-8")
    assert outline.with_table(page, "cell tags", TABLE) == TEXT


def test_every_command_that_it_names_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert set(re.findall(r"`make ([a-z-]+)", TEXT)) <= set(targets)
    assert set(re.findall(r"-m amp_utils\.course ([a-z]+)", TEXT)) <= set(__main__.COMMANDS)


def test_every_place_that_it_names_exists():
    tops = (
        r"(?:notebooks|amp_utils|tests|imgs)/|TEACHING|Makefile|pyproject|environment|requirements"
    )
    named = set(re.findall(rf"(?<![\w./-])((?:{tops})[\w./*]*[\w/*])", TEXT))
    assert len(named) > 15
    for name in named:
        assert list(ROOT.glob(name)), f"{name} does not exist"
