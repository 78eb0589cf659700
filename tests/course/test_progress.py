"""`make progress` counts what was done, names what comes next and which predictions were wrong."""

import json

import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, writes

from amp_utils.course.progress import command


@pytest.mark.parametrize("folder", ["learn", "notebooks"])
def test_progress_is_a_table_of_the_copies_or_of_the_originals_where_there_are_none(
    tmp_path, folder
):
    def cell(make, source, tag):
        return make(source, metadata={"tags": [tag]})

    cells = [
        cell(new_markdown_cell, "**Predict.** Which dtype?\nSay it.", "predict"),
        cell(new_markdown_cell, "**Predict.** How many?", "predict"),
        cell(new_code_cell, "", "exercise"),
    ]
    (tmp_path / folder).mkdir()
    for name in ("06_grad_scaler", "A1_tensors_and_autograd"):
        (tmp_path / folder / f"{name}.ipynb").write_text(writes(new_notebook(cells=cells)))

    def shown(**verdicts):
        (tmp_path / folder / "progress.json").write_text(json.dumps(verdicts))
        return CliRunner().invoke(command, obj=tmp_path, catch_exceptions=False).output

    out = shown(**{"06/ex1": "correct", "06/predict1": "wrong", "06/predict2": "right"})
    assert [line.split() for line in out.splitlines()[1:3]] == [
        ["06_grad_scaler", "1", "of", "1", "1", "of", "2"],
        ["A1_tensors_and_autograd", "0", "of", "1", "0", "of", "2"],
    ]
    assert f"  {folder}/06_grad_scaler.ipynb: Which dtype?\n" in out
    assert out.endswith(f"Next: {folder}/A1_tensors_and_autograd.ipynb\n")

    out = shown(**{"06/ex1": "correct", "A1/ex1": "correct"})
    assert "wrong" not in out and out.endswith("Every exercise is solved.\n")
