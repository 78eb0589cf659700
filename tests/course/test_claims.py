"""Every claim of the sources has a cell that settles it, and no verdict contradicts what was measured."""

import copy
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from amp_utils.course import claims
from amp_utils.course.claims import Claim

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SOURCES, CLAIMS = claims.read(NOTEBOOKS / "claims.toml")
LESSONS = {path.stem: nbformat.read(path, 4) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}


def test_claims_cells_and_measured_values_fit_together():
    assert claims.problems(CLAIMS, LESSONS) == []


def test_there_are_at_least_sixty_from_every_source():
    assert len(CLAIMS) >= 60
    assert {claim.source for claim in CLAIMS} == set(SOURCES)
    assert {claim.verdict for claim in CLAIMS} == set(claims.VERDICTS)


def stripped(text: str) -> list[str]:
    """The rows of the ledger without what differs by machine."""
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| [")]
    return [
        " | ".join([*row[:4], row[5].replace("does not hold here", "holds here")]) for row in rows
    ]


def test_the_committed_ledger_is_of_these_claims():
    """Its measured values may be another machine's: `make claims` writes them."""
    measured = {
        key: value for nb in LESSONS.values() for key, value in claims.lesson.settled(nb).items()
    }
    fresh = claims.markdown(claims.rows(CLAIMS, measured), "", SOURCES)
    committed = (NOTEBOOKS / "claims.md").read_text("utf-8")
    assert stripped(committed) == stripped(fresh), (
        "run make claims, or python -m amp_utils.course claims --saved"
    )
    assert "claims.md" in (NOTEBOOKS.parent / "README.md").read_text("utf-8")
    page = (NOTEBOOKS / "claims.html").read_text("utf-8")
    assert page.count("<tr class=") == len(CLAIMS) and "CONTRADICTED:" not in page


def test_the_page_is_well_formed_and_loads_nothing():
    loaded, open_tags = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            loaded.extend(
                value
                for name, value in attributes
                if name == "src" or (tag == "link" and name == "href")
            )
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Reader().feed(
        claims.page([["01_x", "a < b & c", "s", "1", "2", "not true: d"]], "about", {"s": "A & B"})
    )
    assert loaded == open_tags == []


FIELDS = {
    "source": "paper",
    "claim": "It is 8.",
    "published": 8,
    "compare": "equal",
    "lesson": "01_x",
}


def claim(**changes) -> Claim:
    return Claim("eight", **{**FIELDS, "verdict": "reproduced", **changes})


def settled(value, *, tag="claim:eight", source="lesson.settle(eight=x)"):
    output = new_output(
        "display_data", {"text/plain": ""}, metadata={"amp_utils_claims": {"eight": value}}
    )
    return {
        "01_x": new_notebook(
            cells=[new_code_cell(source, outputs=[output], metadata={"tags": [tag]})]
        )
    }


def test_a_claim_that_is_settled_as_stated_is_fine():
    assert claims.problems([claim()], settled(8)) == []
    assert claims.problems([claim(verdict="not true", truth="It is 7.")], settled(7)) == []
    hardware = claim(verdict="depends on hardware", depends_on="The chip.")
    assert claims.problems([hardware], settled(7)) == claims.problems([hardware], settled(8)) == []


@pytest.mark.parametrize(
    ("given", "notebooks", "complaint"),
    [
        (
            [claim()],
            settled(7),
            "eight is said to be 'reproduced', but with 7 the claim does not hold.",
        ),
        (
            [claim(verdict="not true", truth="7")],
            settled(8),
            "said to be 'not true', but with 8 the claim holds.",
        ),
        ([claim()], settled(8, tag="other"), "eight has no cell tagged claim:eight in 01_x."),
        ([claim()], settled(8, source="print(8)"), "does not call lesson.settle(eight=…)"),
        ([claim(lesson="02_y")], settled(8), "eight has no cell tagged claim:eight in 02_y."),
        ([], settled(8), "eight is settled in 01_x and is not in claims.toml."),
        ([claim()], settled(None), "eight was not measured."),
    ],
)
def test_what_does_not_fit_is_a_sentence(given, notebooks, complaint):
    assert any(complaint in sentence for sentence in claims.problems(given, notebooks))


def test_a_changed_measurement_is_noticed():
    """Not only in fixtures: change any one value in the real lessons, and the ledger complains."""
    for number, known in enumerate(CLAIMS):
        if known.verdict != "reproduced" or number % 10:
            continue
        lessons = copy.deepcopy(LESSONS)
        for cell in lessons[known.lesson].cells:
            for output in cell.get("outputs", []):
                if known.id in (values := output.get("metadata", {}).get("amp_utils_claims", {})):
                    values[known.id] = "something else"
        assert [known.id] == [line.split()[0] for line in claims.problems(CLAIMS, lessons)]


@pytest.mark.parametrize(
    ("compare", "published", "good", "bad"),
    [
        ("equal", True, [True], [False, 1, "True"]),
        ("equal", [1.0, "nan"], [[1.0, "nan"]], [[1.0, "inf"]]),
        ("at least", 2, [2, 3.5], [1.9, "inf", None]),
        ("at most", 0.05, [0.0, 0.05], [0.06, "nan"]),
    ],
)
def test_comparisons(compare, published, good, bad):
    subject = claim(compare=compare, published=published)
    assert all(map(subject.holds, good)) and not any(map(subject.holds, bad))


def test_close_is_relative():
    subject = claim(compare="close", published=100.0, tolerance=0.02)
    assert subject.holds(101.9) and subject.holds(98.1) and not subject.holds(103.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('verdict = "true"', "verdict = 'true' is not allowed"),
        ('verdict = "not true"', 'needs truth = "…"'),
        ('verdict = "depends on hardware"', 'needs depends_on = "…"'),
        ('verdict = "reproduced"\ntolerance = 0.1', "tolerance belongs to compare = 'close'"),
        (
            'verdict = "reproduced"\npublisher = "me"',
            "eight: got an unexpected keyword argument 'publisher'",
        ),
        ("", "eight: missing 1 required positional argument: 'verdict'"),
    ],
)
def test_an_entry_that_is_not_complete_is_refused(text, complaint, tmp_path):
    lines = [f"{key} = {value!r}".replace("'", '"') for key, value in FIELDS.items()]
    file = tmp_path / "claims.toml"
    file.write_text('[sources]\npaper = "A paper"\n[eight]\n' + "\n".join(lines) + "\n" + text)
    with pytest.raises(ValueError) as caught:
        claims.read(file)
    assert complaint in str(caught.value)


def test_a_wrong_argument_is_refused(capsys):
    assert claims.main(["--svaed"]) == 2
    assert "--svaed is not allowed" in capsys.readouterr().err
