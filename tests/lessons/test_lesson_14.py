"""Each patient of lesson 14 is ill, three or more repairs mend it, and three or more do not."""

import tomllib

import pytest
import torch
from torch import nn

from amp_utils import clinic, lesson
from amp_utils.course import ROOT
from amp_utils.course.notebook import choose, read

REPAIRS = tomllib.loads((ROOT / "tests" / "support" / "repairs.toml").read_text("utf-8"))
PATIENTS = REPAIRS["patients"]
CELLS = {cell.id: cell.source for cell in read(choose(["14"], ROOT / "notebooks")[0]).cells}
QUICK = {"8", "20", "25", "X"}  # the others are `full`
BOTH = "float32 and bfloat16"
IMPORTS = "import copy\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


def loop_of(source, edits=()):
    """The loop in a cell, without decorator or check, and with these edits."""
    source = source[source.index("def ") :].partition("\n\n\ncheck_")[0] + "\n"
    for edit in edits:
        old, new = REPAIRS["shared"][edit] if isinstance(edit, str) else edit
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in\n{source}"
        source = source.replace(old, new)
    space = {"device": torch.device("cpu")}
    exec(IMPORTS + source, space)
    return next(reversed(space.values()))


@pytest.fixture(scope="module")
def ward():
    space = {"steps": 30, "seed": 0, "device": torch.device("cpu")}
    space |= {"torch": torch, "nn": nn, "clinic": clinic}
    exec(CELLS["network"] + "\n" + CELLS["ward"], space)
    return space["ward"]


def judged(ward, number, loop):
    try:
        ward.judge(number, loop)
    except AssertionError as error:
        return f"ill: {error}"
    return "healthy"


def test_every_patient_has_its_repairs():
    assert set(PATIENTS) | {"0"} == set(clinic.PATIENTS)
    assert {f"loop-{number}" for number in PATIENTS} <= set(CELLS)
    measured = [fact for patient in clinic.PATIENTS.values() for fact in patient["healthy"]]
    assert {fact.split()[0] for fact in measured} <= set(clinic.WORDS)
    for repairs in PATIENTS.values():
        assert len(repairs["right"]) >= 2 and len(repairs["wrong"]) >= 3


@pytest.mark.parametrize(
    "number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in PATIENTS]
)
def test_right_repairs_are_accepted_and_wrong_ones_refused(ward, number):
    sick, repairs = CELLS[f"loop-{number}"], PATIENTS[number]
    ward.admit(number)(loop_of(sick))
    own_source = CELLS[f"{'solution' if number in 'XYZ' else 'mended'}-{number}"]
    own = loop_of(own_source)
    if number != "21":  # who is healthy
        assert judged(ward, number, loop_of(sick)).startswith("ill: ")
        assert repr(ward.seen.losses) == repr(ward.ill[number].losses)
    for loop in (own, *(loop_of(sick, edits) for edits in repairs["right"])):
        assert judged(ward, number, loop) == "healthy"
    if "GradScaler(device.type" in own_source and "bfloat16" not in own_source:
        bare = own_source.replace("GradScaler(device.type", "GradScaler(device.type, enabled=False")
        assert "without a scaler" in judged(ward, number, loop_of(bare))
    for edits in repairs["wrong"]:
        assert judged(ward, number, loop_of(sick, edits)).startswith("ill: "), edits


def test_signs_tell_casts_by_autocast_from_weights_in_16_bits(ward, capsys):
    def by_hand(net, batches):
        x, _ = batches[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(x)  # four casts by autocast; the next two are not
            net[0].weight.half()
            net[0].weight.to(torch.bfloat16)
            yield 1.0
        net.to(torch.bfloat16)
        yield net(x.to(torch.bfloat16)).float().sum().item()

    chart = clinic.observe(by_hand, ward.network(), ward.batches)
    assert (chart.raised, chart.casts, chart.kept) == ("", 4, {"float32", "bfloat16"})
    for number, kept, casts in (("9", "float16", 0), ("12", "float32", 4), ("14", BOTH, 120)):
        ward.admit(number)(loop_of(CELLS[f"loop-{number}"]))
        signs = capsys.readouterr().out
        assert f"weights kept in    {kept}\n" in signs
        assert f"casts by autocast  {casts} of weights\n" in signs


def test_signs_count_weights_that_a_loop_makes_and_diagnoses_have_a_second_form(ward, capsys):
    ward.admit(1)(loop_of(CELLS["loop-1"]))
    assert ward.ill[1].casts == 4  # once each, of which two belong to the new head
    assert "no measure: no step was taken" in capsys.readouterr().out
    ward.admit(3)(loop_of(CELLS["loop-3"]))
    assert "0.45, then stopped" in capsys.readouterr().out
    assert [ward.illness(19, guess) for guess in (None, "f", "D")] == ["L", "F", "L"]
    assert [ward.illness(18, guess) for guess in (None, "f", "E")] == ["D", "F", "D"]
    for guess in ("dc", ["D", "C"]):  # two letters, in either order
        lesson.predict(guess, ward.illness("X", guess))
    assert capsys.readouterr().out.count("✓") == 2
    assert ward.illness("X", ["D", "D"]) == ["C", "D"]
