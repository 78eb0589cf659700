"""Every lesson refuses a wrong parameter in one sentence, before any work."""

import re

import pytest
import torch

from amp_utils.course import ROOT
from amp_utils.course.notebook import cells, lessons
from amp_utils.lesson import ParameterError

PATHS = lessons(ROOT / "notebooks")
WRONG = {
    "str": ["fp12", "", 3],
    "int": [-1, "many", 1.5, True],
    "float": ["many", float("nan"), float("inf")],
}
ALSO_WRONG = {
    "device": ["tpu", "CPU", "cuda"],  # of which there is none
    "max_norm": [0, -1.0],
    "init_scale": [0.0],
    "steps": [10**9],
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_defaults_are_accepted_and_a_wrong_value_is_one_sentence_that_names_it(
    path, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parameters, validation, *_ = [cell.source for cell in cells(path) if cell.is_code]
    namespace: dict = {}
    exec(parameters, namespace)
    exec(validation, namespace)
    assert namespace["device"] == torch.device("cpu")

    for name, kind in re.findall(r"^(\w+): (\w+) = ", parameters, re.M):
        for value in WRONG.get(kind, []) + ALSO_WRONG.get(name, []):
            exec(parameters, namespace)
            namespace[name] = value
            with pytest.raises(ParameterError) as caught:
                exec(validation, namespace)
                pytest.fail(f"{name} = {value!r} was accepted")
            wanted = rf"{name} = {re.escape(repr(value))} is not [^\n]+: give [^\n]+\."
            assert re.fullmatch(wanted, str(caught.value)), f"{name} = {value!r}"


def test_papermill_lists_every_parameter_with_type_and_help():
    import papermill

    for path in PATHS:
        parameters = papermill.inspect_notebook(str(path))
        assert parameters, path.stem
        for name, parameter in parameters.items():
            kind, words = parameter["inferred_type_name"], parameter["help"]
            assert kind in ("str", "int", "float", "bool"), f"{path.stem}, {name}: {kind}"
            assert len(words) > 10, f"{path.stem}, {name} needs a comment that says what it is"
