"""Every claim can be measured where it is shown, keeps its own date, and fits its verdict."""

import builtins
import json
import os
import shutil
import subprocess
import symtable
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from amp_utils.course import CourseError, claims, notebook, pages
from amp_utils.course.__main__ import main
from amp_utils.course.cells import evaluate
from amp_utils.course.claims import Claim

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
COURSE = claims.read(NOTEBOOKS)
CLAIMS = COURSE.claims
LESSONS = {path.stem: notebook.cells(path) for path in notebook.lessons(NOTEBOOKS)}
LEDGER = ("measured.json", "claims.md")

MACHINE, OLD = "an old machine", {"torch": "2.0", "date": "1999-12-31"}
VERDICTS = json.loads(claims.SCHEMA.read_text())["properties"]["claims"]["additionalProperties"][
    "properties"
]["verdict"]["enum"]

ENTRY = {
    "source": "paper",
    "where": "table 1",
    "says": "It is 8.",
    "seen": True,
    "question": "range",
    "number": "source",
    "expected": 8,
    "compare": "equal",
    "lesson": "01_float_formats",
    "cell": "claim:eight",
    "measure": "x",
    "verdict": "reproduced",
}
CHECK = {
    "basis": "our expectation",
    **{key: ENTRY[key] for key in ("says", "expected", "compare", "lesson", "cell", "measure")},
}


def claim(**changes) -> Claim:
    return Claim(id="eight", **{**ENTRY, **changes})


def old(value) -> dict:
    """What measured.json holds of a claim that was measured long ago."""
    return {MACHINE: {"value": value, **OLD}}


def toml(entries: dict[str, dict], source: str = "paper") -> str:
    """A claims.toml with one source and one question; JSON's values are TOML's too."""
    tables = {
        f"sources.{source}": {"title": "A paper", "date": "1998", "place": "a shelf"},
        "questions": {"range": "What can 16 bits hold?"},
        "claims": {},
    }
    for name, fields in entries.items():
        tables[f"{'checks' if 'basis' in fields else 'claims'}.{name}"] = fields
    lines = []
    for name, fields in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    return "\n".join(lines)


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of two lessons that stop at their last cell; `course(entries)` writes its claims.

    The current folder is another one.
    """
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sources = {"x = 8": "claim:eight", "x += 1": "claim:nine", "x / 0": "claim:end"}
    cells = [new_code_cell(code, metadata={"tags": [tag]}) for code, tag in sources.items()]
    for lesson in ("01_float_formats", "02_numerical_stability"):
        nbformat.write(new_notebook(cells=cells), tmp_path / "notebooks" / f"{lesson}.ipynb")

    def write(entries: dict[str, dict], measured: dict | None = None) -> Path:
        (tmp_path / "notebooks" / "claims.toml").write_text(toml(entries))
        if measured is not None:
            (tmp_path / "notebooks" / "measured.json").write_text(json.dumps(measured))
        return tmp_path

    return write


def page(notebooks: Path) -> str:
    """The ledger's page in the handout."""
    around = {"parts": {}, "cards": {}, "ledger": True, "here": "claims", "up": "../", "down": ""}
    return pages.page("claims.html.j2", **claims.shown(notebooks), **around)


def stored(root: Path) -> dict:
    return json.loads((root / "notebooks" / "measured.json").read_text())


# The claims of this course


def faults(given: list[Claim], lessons: dict[str, list[notebook.Cell]]) -> list[str]:
    """What keeps claims from being measured, found without running a lesson."""
    found = []
    for c in given:
        if not c.lesson:
            continue
        code = [cell for cell in lessons.get(c.lesson, []) if cell.is_code]
        places = [i for i, cell in enumerate(code) if c.cell in cell.tags]
        try:
            wanted = symtable.symtable(f"lambda raised: ({c.measure})", c.id, "eval")
        except SyntaxError:
            found.append(f"{c.id}: measure is not an expression: {c.measure}")
            continue
        if len(places) != 1:
            found.append(f"{c.id}: {len(places)} code cells of {c.lesson} are tagged {c.cell}")
            continue
        before = "\n".join(cell.source for cell in code[: places[0] + 1])
        defined = {s.get_name() for s in symtable.symtable(before, c.lesson, "exec").get_symbols()}
        for name in sorted(global_names(wanted) - defined - vars(builtins).keys()):
            found.append(f"{c.id}: {name} is not defined in {c.lesson} by {c.cell}")
    used = {(c.lesson, c.cell) for c in given}
    for name, cells in lessons.items():
        tags = {tag for cell in cells for tag in cell.tags if tag.startswith("claim")}
        found += [f"{tag} in {name} has no claim" for tag in tags if (name, tag) not in used]
    return found


def global_names(table: symtable.SymbolTable) -> set[str]:
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return own.union(*map(global_names, table.get_children()))


def test_every_claim_can_be_measured_where_it_is_shown():
    assert faults(CLAIMS, LESSONS) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"measure": "x +"}, "eight: measure is not an expression"),
        ({"measure": "[x for _ in range(z)]"}, "eight: z is not defined"),
        ({"measure": "later"}, "eight: later is not defined"),
        ({"cell": "claim:nine"}, "eight: 0 code cells"),
        ({"lesson": "03_autocast_dtypes"}, "eight: 0 code cells"),
        ({"cell": "claim:twice"}, "eight: 2 code cells"),
    ],
)
def test_a_claim_that_cannot_be_measured_is_found(change, fault):
    sources = {"x = 8": "claim:eight", "later = 1": "claim:twice", "z = 1": "claim:twice"}
    cells = [notebook.Cell(True, code, frozenset({tag})) for code, tag in sources.items()]
    lessons = {"01_float_formats": cells}
    strays = ["claim:twice in 01_float_formats has no claim"]
    assert faults([claim()], lessons) == strays
    assert any(line.startswith(fault) for line in faults([claim(**change)], lessons))


def test_every_value_is_committed_with_its_origin_and_fits_its_verdict():
    assert list(COURSE.measured) == [c.id for c in CLAIMS if c.lesson]
    entries = [entry for values in COURSE.measured.values() for entry in values.values()]
    assert all(entry.keys() == {"value", *OLD} for entry in entries)
    wrong = [c.contradiction(COURSE.measured.get(c.id, {})) for c in CLAIMS]
    assert [sentence for sentence in wrong if sentence] == []


def test_every_source_and_question_has_claims():
    for field, table in {"source": COURSE.sources, "question": COURSE.questions}.items():
        assert {getattr(c, field) for c in CLAIMS if c.verdict != "checked"} == set(table)


def test_a_row_leans_on_no_other():
    leaning = ("the same", "likewise", "as above", "see above", "again")
    rows = [c for c in CLAIMS if (c.because or "").lower().startswith(leaning)]
    assert [c.id for c in rows] == []


def test_what_sources_say_of_a_gpus_speed_is_measured_on_a_gpu_only():
    sources = {"recipe", "recipe_2021", "recipe_2025", "effective", "paper"}
    rows = [c for c in CLAIMS if c.verdict != "checked" and c.question == "faster"]
    rows = [c for c in rows if c.source in sources]
    assert len(rows) > 3
    assert [c.id for c in rows if "device.type == 'cuda'" not in c.measure] == []


def test_no_lesson_holds_a_trace_of_a_claim_but_a_tag():
    for path in notebook.lessons(NOTEBOOKS):
        for cell in notebook.read(path).cells:
            assert "settle(" not in cell.source, path.stem
            assert "claim settled" not in str(cell.get("outputs")), path.stem


def test_the_committed_ledger_is_rendered_from_the_committed_values(tmp_path):
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks")
    assert main(["--root", str(tmp_path), "claims", "--render"]) == 0
    for name in LEDGER:
        committed = (NOTEBOOKS / name).read_text("utf-8")
        assert (tmp_path / "notebooks" / name).read_text("utf-8") == committed, f"{name} is stale"


# Measuring and rendering


def test_a_lesson_is_run_to_its_last_claim(course):
    root = course({"eight": {**ENTRY, "measure": "x"}})
    assert main(["--root", str(root), "claims", "01"]) == 0, "a later cell divides by zero"


def test_expressions_are_evaluated_after_their_cells(course, capsys):
    expressions = {
        "eight": "x",
        "infinite": "[float('inf'), 2.0]",
        "refused": "raised(lambda: x.nothing)",
        "quiet": "raised(lambda: x)",
        "unfit": "object()",
        "unknown": "nothing",
        "broken": "x +",
        "false": "x + 1",
    }
    entries = {name: {**ENTRY, "measure": measure} for name, measure in expressions.items()}
    entries["nine"] = {**CHECK, "cell": "claim:nine", "expected": 9}
    entries["last"] = {**ENTRY, "cell": "claim:end"}
    entries["missing"] = {**ENTRY, "cell": "claim:none"}
    root = course(entries, {"unknown": old(8)})
    assert main(["--root", str(root), "claims", "01"]) == 1

    values = {name: list(by.values())[-1]["value"] for name, by in stored(root).items()}
    assert values["eight"] == 8 and values["nine"] == 9 and values["infinite"] == ["inf", 2.0]
    assert values["refused"] == "AttributeError: 'int' object has no attribute 'nothing'"
    assert values["quiet"] == ""
    assert stored(root)["unknown"] == old(8), "a failed measurement loses nothing"
    assert [entry["date"] > "2000" for entry in stored(root)["eight"].values()] == [True]
    sentences = capsys.readouterr().err
    for sentence in (
        "01_float_formats: ZeroDivisionError: division by zero",
        "last was not measured.",
        "missing: no cell is tagged claim:none.",
        "unfit: TypeError: Object of type object is not JSON serializable",
        "unknown: NameError: name 'nothing' is not defined",
        "broken: SyntaxError",
        "false is said to be 'reproduced', but with 9 it does not hold (",
    ):
        assert sentence in sentences
    assert "Traceback" not in sentences


@pytest.mark.full
def test_validation_measures_the_claims_too(course):
    """Of `make validate CLAIMS=yes`, which holds every verdict against a new measurement."""
    expressions = {"eight": "x", "false": "x + 1", "unknown": "nothing"}
    entries = {name: {**ENTRY, "measure": measure} for name, measure in expressions.items()}
    lesson = course(entries, {}) / "notebooks" / "01_float_formats.ipynb"
    command = [sys.executable, "-m", "pytest", "-p", "support.claimed", "--nbval-lax", lesson]
    root = NOTEBOOKS.parent
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "false is said to be 'reproduced', but with 9 it does not hold (here)." in done.stdout
    assert "unknown: NameError: name 'nothing' is not defined" in done.stdout
    assert "eight" not in done.stdout, "what holds is not mentioned"


def test_measuring_leaves_the_lessons_random_numbers_alone():
    import torch

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    evaluate(lambda raised: torch.rand(1).item())
    assert torch.rand(1) == expected


def test_only_what_was_measured_changes_its_value_and_date(course, monkeypatch):
    second = {**ENTRY, "lesson": "02_numerical_stability"}
    before = {name: old(8) for name in ("eight", "second", "forgotten")}
    root = course({"eight": ENTRY, "second": second}, before)

    def measure(lesson, _):
        if lesson.stem.startswith("02"):
            raise KeyboardInterrupt
        return {"eight": 8}, []

    monkeypatch.setattr(claims, "measure", measure)
    assert main(["--root", str(root), "claims"]) == 130
    assert stored(root)["second"] == old(8)
    assert "forgotten" not in stored(root), "values of claims that are gone go too"
    there, here = stored(root)["eight"].items()
    assert there == (MACHINE, {"value": 8, **OLD}), "another machine's value stays"
    assert here[1]["date"] > "2000"


def test_rendering_changes_no_value_machine_or_date(course):
    odd = {**ENTRY, "says": "a < b | <i>c</i>"}
    root = course({"eight": odd}, {"eight": old(8)})
    assert main(["--root", str(root), "claims", "--render"]) == 0
    assert stored(root) == {"eight": old(8)}
    html, text = page(root / "notebooks"), (root / "notebooks" / "claims.md").read_text()
    assert "<li>1999-12-31, torch 2.0, an old machine</li>" in html
    assert "1. 1999-12-31, torch 2.0, an old machine" in text
    assert " | a < b \\| <i>c</i> | A paper, table 1 | 8 | 8 [1] | reproduced |" in text
    assert "<td>a &lt; b | &lt;i&gt;c&lt;/i&gt;<span" in html and "<i>c" not in html


def test_machines_stand_side_by_side(course):
    fast = {**ENTRY, "verdict": "depends on hardware", "because": "The chip."}
    entries = {"eight": fast, "unseen": {**ENTRY, "seen": False, "says": "Hearsay."}}
    root = course(entries, {name: old(8) for name in entries})
    origin = {"machine": "a GPU", "torch": "2.13", "date": "2026-12-01"}
    assert claims.adopt(root / "notebooks", {"eight": 7}, **origin) == []
    new = {"value": 7, "torch": "2.13", "date": "2026-12-01"}
    assert stored(root)["eight"] == old(8) | {"a GPU": new}
    text = (root / "notebooks" / "claims.md").read_text()
    assert "| it gives | an old machine | a GPU | verdict |" in text
    assert "| 8 | 8: holds [1] | 7: does not hold [2] | depends on hardware: The chip. |" in text
    assert "| Hearsay. | A paper, table 1 (not seen) | 8 | 8 [1] | – | reproduced |" in text


def test_a_row_leads_to_an_anchor_of_the_lessons_page(course):
    root = course({"eight": ENTRY}, {"eight": old(8)})
    lesson = notebook.read(root / "notebooks" / "01_float_formats.ipynb")
    anchor = f"cell-id={lesson.cells[0].id}"
    assert f'href="01_float_formats.html#{anchor}"' in page(root / "notebooks")
    assert f'id="{anchor}"' in pages.cells(lesson, root, True)


def test_a_falsified_value_is_contradicted(course, capsys):
    root = course({"eight": ENTRY}, {"eight": old(7)})
    assert main(["--root", str(root), "claims", "--render"]) == 1
    sentence = "eight is said to be 'reproduced', but with 7 it does not hold (an old machine).\n"
    assert capsys.readouterr().err == sentence
    assert '<tr id="eight" class=CONTRADICTED' in page(root / "notebooks")


def test_ten_claims_are_the_most_surprising():
    html = page(NOTEBOOKS)
    surprising = [c for c in CLAIMS if c.surprise]
    assert len(surprising) == 10
    assert all(f'<li><a href="#{c.id}">' in html for c in surprising)


def test_every_row_leads_to_its_cell():
    html = page(NOTEBOOKS)
    ids = {(name, tag): cell.id for name in LESSONS for cell in LESSONS[name] for tag in cell.tags}
    for c in CLAIMS:
        assert f'<tr id="{c.id}"' in html
        if c.lesson:
            cell = f"#cell-id={ids[c.lesson, c.cell]}"
            assert f'href="{c.lesson}.html{cell}"' in html


def test_the_page_is_well_formed_and_loads_nothing():
    loaded, open_tags = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            links = [value for name, value in attributes if name == "src" or tag == "link"]
            loaded.extend(value for value in links if not value.startswith(("data:", "icon")))
            if tag not in ("meta", "link", "input", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Reader().feed(page(NOTEBOOKS))
    assert loaded == ["book.js"] and open_tags == []


# Comparisons, verdicts and refusals


@pytest.mark.parametrize(
    ("changes", "good", "bad"),
    [
        ({"compare": "equal", "expected": True}, [True], [False, 1, "True"]),
        ({"compare": "equal", "expected": [1.0, "nan"]}, [[1.0, "nan"]], [[1.0, "inf"]]),
        ({"compare": "at least", "expected": 2}, [2, 3.5], [1.9, "inf", None]),
        ({"compare": "at most", "expected": 0.05}, [0.0, 0.05], [0.06, "nan", False]),
        ({"compare": "close", "expected": 100.0, "tolerance": 0.02}, [101.9, 98.1], [103.0]),
    ],
)
def test_comparisons(changes, good, bad):
    subject = claim(**changes)
    assert all(map(subject.holds, good)) and not any(map(subject.holds, bad))


FITTING = {  # the values of two machines: such as fit a verdict, and such as contradict it
    **dict.fromkeys(claims.HOLDING, ([[8, 8], [8, None]], [[7, 7], [8, 7], [None, None], []])),
    **dict.fromkeys(
        ("not true", "not true as printed", "outdated", "different setup"),
        ([[7, 6], [None, 7]], [[8, 8], [7, 8], [None, None], []]),
    ),
    "depends on hardware": ([[8, 7], [7, None], [None]], [["inf", 7], [True, 8], []]),
}


@pytest.mark.parametrize("verdict", sorted({*VERDICTS, "checked"} - {"not measurable here"}))
def test_a_verdict_stands_only_beside_values_that_fit(verdict):
    for answers, wrong in zip(FITTING[verdict], (False, True), strict=True):
        for values in answers:
            measured = {f"machine {i}": {"value": value} for i, value in enumerate(values)}
            sentence = claim(verdict=verdict).contradiction(measured)
            assert bool(sentence) == wrong, (verdict, values, sentence)


WHY = {"because": "It is so."}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"verdict": "true"}, "eight.verdict: 'true' is not one of ['reproduced', 'computed',"),
        *(
            ({"verdict": verdict}, "eight: 'because' is a required property.")
            for verdict in set(VERDICTS) - {"reproduced", "not measurable here"}
        ),
        ({"verdict": "outdated", **WHY}, "eight: 'until' is a required property."),
        ({"until": "torch 1.9"}, "eight: "),
        ({"verdict": "depends on hardware", "expected": True, **WHY}, "True is not of type"),
        ({"compare": "close"}, "eight: 'tolerance' is a required property."),
        ({"tolerance": 0.1}, "eight.compare: 'close' was expected."),
        ({"compare": "at least", "expected": "8"}, "eight.expected: '8' is not of type"),
        ({"publisher": "me"}, "eight: Unevaluated properties are not allowed ('publisher'"),
        ({"cell": "eight"}, "eight.cell: 'eight' does not match '^claim:"),
        ({"source": "hearsay"}, "claims.toml, eight: 'hearsay' is not in [sources]."),
        ({"question": "why"}, "claims.toml, eight: 'why' is not in [questions]."),
        ({"where": ""}, "eight.where: "),
        *(
            ({field: None}, f"eight: {field!r} is a required property.")
            for field in ("source", "where", "says", "seen", "question", "number")
        ),
        ({"cell": None}, "eight: 'cell' is a dependency of"),
        ({"verdict": "not measurable here", **WHY}, "should not be valid under"),
        (dict.fromkeys(("lesson", "cell", "measure")), "eight: 'measure' is a required property."),
    ],
)
def test_an_entry_that_is_incomplete_is_refused(changes, sentence, course):
    entry = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
    with pytest.raises(CourseError) as caught:
        claims.read(course({"eight": entry}) / "notebooks")
    assert sentence in str(caught.value)


def test_what_no_machine_has_measured_is_not_measurable_here(course):
    fast = {**ENTRY, "verdict": "depends on hardware", **WHY}
    root = course({"eight": fast}, {"eight": old(None)})
    assert main(["--root", str(root), "claims", "--render"]) == 0
    text = (root / "notebooks" / "claims.md").read_text()
    assert "| 8 | not measurable [1] | not measurable here: It is so. |" in text
    claims.adopt(root / "notebooks", {"eight": 7}, machine="a GPU", **OLD)
    text = (root / "notebooks" / "claims.md").read_text()
    assert "| 7: does not hold [2] | depends on hardware: It is so. |" in text


def test_what_has_no_instrument_here_needs_no_cell(course):
    entry = {**ENTRY, "verdict": "not measurable here", "because": "No GPU."}
    entry = {key: value for key, value in entry.items() if key not in ("lesson", "cell", "measure")}
    root = course({"eight": entry})
    assert main(["--root", str(root), "claims", "--render"]) == 0
    text = (root / "notebooks" / "claims.md").read_text()
    assert "| – | It is 8. | A paper, table 1 | 8 | not measurable here: No GPU. |" in text


def test_a_check_has_a_basis_and_no_verdict(course):
    with pytest.raises(CourseError, match="eight: 'basis' is a required property"):
        text = toml({"eight": CHECK})
        root = course({})
        (root / "notebooks" / "claims.toml").write_text(text.replace("basis", "verdict"))
        claims.read(root / "notebooks")


@pytest.mark.parametrize("name", ["01_float_formats.ipynb", "claims.toml", "measured.json"])
def test_a_damaged_file_is_named_in_a_sentence(name, course, capsys):
    root = course({"eight": ENTRY}, {})
    (root / "notebooks" / name).write_text("{")
    assert main(["--root", str(root), "claims"]) == 1
    message = capsys.readouterr().err
    assert name in message and "damaged" in message and len(message.splitlines()) == 1
