"""Every lesson refuses a wrong parameter in its second code cell, in one sentence, before any work."""

from pathlib import Path

import nbformat
import pytest

from amp_utils.lesson import ParameterError

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
WRONG = {
    "str": ["fp12", "", 3],
    "int": [-1, "many", 1.5, True],
    "float": ["many", float("nan"), float("inf")],
}
ALSO_WRONG = {
    "device": ["tpu", "CPU"],
    "max_norm": [0, -1.0],
    "init_scale": [0.0],
    "steps": [10**9],
}


def first_cells(path: Path) -> tuple[str, str]:
    """Source of the parameters cell and of the cell that validates them."""
    cells = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    return cells[0], cells[1]


def cases():
    for path in NOTEBOOKS:
        for line in first_cells(path)[0].splitlines():
            name, kind = line.split("=")[0].replace(" ", "").split(":")
            for value in WRONG.get(kind, []) + ALSO_WRONG.get(name, []):
                yield pytest.param(path, name, value, id=f"{path.stem}-{name}-{value}")


@pytest.mark.parametrize(("path", "name", "value"), list(cases()))
def test_a_wrong_value_is_one_sentence_that_names_it(path, name, value, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parameters, validation = first_cells(path)
    namespace: dict = {}
    exec(parameters, namespace)
    namespace[name] = value
    with pytest.raises(ParameterError) as caught:
        exec(validation, namespace)
    sentence = str(caught.value)
    assert sentence.startswith(f"{name} = {value!r} is not ") and ": give " in sentence
    assert sentence.endswith(".") and "\n" not in sentence


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_defaults_are_accepted(path):
    namespace: dict = {}
    for source in first_cells(path):
        exec(source, namespace)
    assert namespace["device"].type in ("cpu", "cuda")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cuda_without_a_gpu_is_refused(path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parameters, validation = first_cells(path)
    namespace: dict = {}
    exec(parameters, namespace)
    namespace["device"] = "cuda"
    with pytest.raises(ParameterError, match="device = 'cuda' is not on this machine"):
        exec(validation, namespace)
