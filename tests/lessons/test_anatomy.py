"""Every lesson keeps every rule of the anatomy, and for every rule a notebook breaks it."""

import copy

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from support import anatomy

from amp_utils.course import ROOT, outline
from amp_utils.course.notebook import PARTS, lessons

NOTEBOOKS = ROOT / "notebooks"

CARD = """# 1 · A good lesson
*One sentence that says why.*

| | |
| --- | --- |
| **You will learn** | 1. one<br>2. two<br>3. three |
| **You need** | nothing |
| **Minutes** | 10 |
| **Runs on** | CPU, 1 s. |"""
EXERCISE = "### Exercise {} · A title (●○○, 5 min)\nDo it."
HINT = "<details><summary>Hint</summary>\n\nThink.\n</details>"
ANSWER = "<details><summary>Answer</summary>\n\nTwo.\n</details>"
RECAP = "## Recap\n1. **One**: `1`.\n2. **Two**: `2`.\n3. **Three**: `3`."
STUB = "def f():\n    raise NotImplementedError"
SOLUTION = "# Solution of exercise {}\ndef f():\n    return 1\n\n\ncheck_f()"
GUESS = "guess = None  # a whole number"
UNGUESSED = "✎ make your guess first\n"


def text(source, *tags):
    return new_markdown_cell(source, metadata={"tags": list(tags)})


def code(source, printed="", *tags, **metadata):
    outputs = [new_output("stream", name="stdout", text=printed)] if printed else []
    return new_code_cell(source, outputs=outputs, metadata={"tags": list(tags), **metadata})


def exercise(number):
    return [
        text(EXERCISE.format(number), "exercise-text"),
        code(STUB, "", "exercise"),
        code(
            "@lesson.check\ndef check_f():\n    assert f() == 1", "✎ not attempted yet\n", "check"
        ),
        text(HINT, "hint"),
        code(SOLUTION.format(number), "✓ correct\n", "solution", jupyter={"source_hidden": True}),
    ]


@pytest.fixture
def good(tmp_path):
    """A notebook without a fault, and the path it would have."""
    path = tmp_path / "notebooks" / "01_float_formats.ipynb"
    (tmp_path / "imgs").mkdir()
    (tmp_path / "imgs" / "here.svg").touch()
    path.parent.mkdir()
    cells = [
        text(CARD),
        code(
            'device: str = "auto"  # where to run\nsteps: int = 3  # how many steps',
            "",
            "parameters",
        ),
        code(
            "lesson.validate(globals(), steps=lesson.whole(1, 9))\ndevice = choose_device(device)"
        ),
        text("Begin. " + "word " * 900),
        text("**Predict.** What is 1 + 1?", "predict"),
        code(GUESS, "", "guess"),
        code("lesson.predict(guess, 1 + 1)\nprint(1 + 1)", UNGUESSED + "2\n"),
        text(ANSWER),
        text("**Predict.** And 2 + 2?", "predict"),
        code(GUESS, "", "guess"),
        code("lesson.predict(guess, 2 + 2)\nprint(2 + 2)", UNGUESSED + "4\n"),
        text(ANSWER),
        text(
            "## The course\n\n"
            "![a picture that is described](../imgs/here.svg) and [a link](01_float_formats.ipynb)"
        ),
        *exercise(1),
        *exercise(2),
        *patient(1),
        text(RECAP),
        text("", "navigation"),
    ]
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    notebook = new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )
    for name in (*PARTS["Start"], path.stem):  # the navigation links to the first lesson
        nbformat.write(notebook, path.with_stem(name))
    notebook.cells[-1].source = outline.generated("navigation", path.parent, lesson=path.stem)
    return notebook, path


def patient(number):
    """One of lesson 14: symptom, loop, guess, what the learner mends, a repair, the answer."""
    loop = "def loop(net, batches):\n    yield 1.0"
    repair = f"lesson.predict(guess_{number}, 'A')\n\n\n@ward.repair({number})\n{STUB}"
    folded = {"source_hidden": True, "outputs_hidden": True}
    mended = "✓ correct\nthe doctor, before: no finding\n", "solution", "patient"
    return [
        text(f"### Patient {number} · A title\nIt is ill.", "patient"),
        code(f"@ward.admit({number})\n{loop}", "loss 1.0\n", "patient", "predict"),
        code(f"guess_{number} = None  # a letter", "", "guess"),
        code(repair, UNGUESSED + "✎ not attempted yet\n", "exercise"),
        code(f"# One repair\n@ward.mended({number})\n{loop}", *mended, jupyter=folded),
        text(ANSWER, "patient"),
    ]


def replace(index, old, new):
    """A fault: `old` in a cell's source becomes `new`."""

    def break_it(nb):
        assert old in nb.cells[index].source
        nb.cells[index].source = nb.cells[index].source.replace(old, new)

    return break_it


def output(index, new):
    def break_it(nb):
        nb.cells[index].outputs = [new] if new else []

    return break_it


def say(words):
    return replace(3, "Begin.", words)


ERROR = new_output("error", ename="ValueError", evalue="no", traceback=[])
STDERR = new_output("stream", name="stderr", text="UserWarning: careful")
FIGURE = new_output("display_data", data={"image/png": "iVBOR"})
FAULTS = {
    "card_is_complete": [
        replace(0, "| **Minutes** | 10 |\n", ""),
        replace(0, "*One sentence that says why.*", ""),
        replace(0, "Minutes** | 10", "Minutes** | ten"),
    ],
    "parameters_come_first_typed_and_explained": [
        replace(1, "  # how many steps", ""),
        replace(1, ": int", ""),
        lambda nb: nb.cells[1].metadata.update(tags=[]),
        lambda nb: nb.cells[1].update(source=""),
    ],
    "parameters_are_validated_next": [
        replace(2, "steps=lesson.whole(1, 9)", ""),
        replace(2, "choose_device(device)", "device"),
    ],
    "predictions_are_committed_and_answered": [
        replace(5, "None", "2"),
        replace(5, "  # a whole number", ""),
        lambda nb: nb.cells[9].metadata.update(tags=[]),
        replace(10, "(guess", "(None"),
        replace(11, "Answer", "Reply"),
        replace(4, "**Predict.**", "Guess:"),
        lambda nb: nb.cells[4].metadata.update(tags=[]),
    ],
    "an_answer_that_a_clock_decides_is_not_compared": [
        replace(6, "1 + 1)", "timing.compare({}))"),
        replace(10, "lesson", "before = perf_counter()\nlesson"),
    ],
    "exercises_have_their_shape": [
        lambda nb: nb.cells[17].metadata.pop("jupyter"),
        replace(17, "# Solution of exercise 1\n", "# It returns 1\n"),
        replace(13, "(●○○, 5 min)", ""),
        replace(14, "raise NotImplementedError", "return 1"),
        output(15, new_output("stream", text="✓ correct\n")),
        output(17, new_output("stream", text="✗ not yet\n")),
        lambda nb: nb.cells[15].metadata.update(tags=[]),
    ],
    "patients_have_their_shape": [
        replace(24, "@ward.admit(1)", "@ward.admit(2)"),
        output(24, None),
        replace(24, "def loop", "import os\n" * 20 + "def loop"),
        replace(25, "guess_1", "guess_2"),
        replace(26, "guess_1", "guess_2"),
        replace(26, "raise NotImplementedError", "return net"),
        output(26, new_output("stream", name="stdout", text=UNGUESSED)),
        output(27, new_output("stream", name="stdout", text="✗ not yet\n")),
        lambda nb: nb.cells[27].metadata.pop("jupyter"),
        replace(28, "Answer", "Reply"),
        lambda nb: nb.cells[26].metadata.update(tags=[]),
    ],
    "numbers_rather_than_booleans": [
        output(6, new_output("stream", text="near: True\nfar: False\n"))
    ],
    "recap_answers_every_objective": [
        replace(29, "\n3. **Three**: `3`.", ""),
        replace(29, "`3`", "three"),
    ],
    "navigation_is_up_to_date": [replace(30, "Contents", "Index")],
    "pictures_have_alt_text_and_are_local": [
        replace(12, "a picture that is described", ""),
        replace(12, "../imgs/here.svg", "https://example.org/picture.svg"),
        say('<img src="x.png">'),
        output(6, FIGURE),
    ],
    "links_lead_somewhere": [
        replace(12, "(01_float_formats.ipynb)", "(99_not_written.ipynb)"),
        replace(12, "(01_float_formats.ipynb)", "(01_float_formats.ipynb#Nowhere)"),
    ],
    "code_cells_are_short": [
        replace(6, "print(1 + 1)", "print(1 + 1)\n" + "x = 1\n" * 30),
        lambda nb: [
            cell.update(source=cell.source + "\nx = 1" * 9)
            for cell in nb.cells[2:]
            if "outputs" in cell and "guess" not in cell.metadata.tags
        ],
    ],
    "bookkeeping_is_folded": [
        replace(6, "print(1 + 1)", "lesson.record(two=1 + 1)"),
        lambda nb: nb.cells[6].update(
            source="lesson.record(two=1 + 1)", metadata={"tags": ["record"]}
        ),
    ],
    "words_are_enough_and_not_too_many": [
        replace(3, "word ", ""),
        replace(3, "word ", "word " * 2),
    ],
    "executed_from_top_to_bottom": [
        lambda nb: nb.cells[6].update(execution_count=7),
        lambda nb: nb.cells[6].update(execution_count=None),
    ],
    "nothing_failed_or_warned": [output(2, ERROR), output(2, STDERR)],
    "outputs_are_stored": [
        output(6, None),
        lambda nb: nb.cells[6].update(source="lesson.predict(guess, 2)", outputs=[]),
    ],
    "no_old_names": [
        say("torch.cuda.amp.autocast"),
        replace(2, "device = ", "torch.jit.script\ndevice = "),
        say("from torch.cuda import amp"),
    ],
    "kernel_is_python3": [lambda nb: nb.metadata.kernelspec.update(name="my-kernel")],
    "few_outputs_are_ignored": [
        lambda nb: [
            nb.cells[i].metadata.tags.append("nbval-ignore-output") for i in (2, 6, 10, 24)
        ],
        lambda nb: nb.cells[6].metadata.tags.append("nbval-skip"),
    ],
    "no_commented_out_code": [
        replace(6, "print(1 + 1)", "# loss.backward()\nprint(1 + 1)"),
        replace(6, "print(1 + 1)", "# for x in xs:\nprint(1 + 1)"),
    ],
    "loops_really_run": [replace(6, "print(1 + 1)", "for i in range(0):\n    f()\nprint(1 + 1)")],
    "nothing_is_fetched": [
        replace(2, "device = ", "!pip install torch\ndevice = "),
        replace(2, "device = ", "torch.hub.load('a', 'b')\ndevice = "),
    ],
    "nothing_of_this_machine_is_stored": [
        replace(2, "device =", "import sys\nsys.path.append('..')\ndevice ="),
        output(6, new_output("stream", text="saved in\n/home/ada/course\n")),
        output(6, new_output("stream", text="<f at 0x7f3a5c01d2e0>\n")),
        replace(6, "print(1 + 1)", r'open("C:\Users\ada.txt")'),
        output(6, new_output("display_data", data={"text/html": "<a href='/tmp/x'>x</a>"})),
    ],
}


@pytest.mark.parametrize("path", lessons(NOTEBOOKS), ids=lambda path: path.stem)
def test_a_lesson_keeps_every_rule(path):
    complaints = anatomy.complaints(nbformat.read(path, as_version=4), path)
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_notebook_is_a_lesson_of_the_course():
    there = {path for path in NOTEBOOKS.glob("*.ipynb") if not path.name.startswith(".")}
    assert there == set(lessons(NOTEBOOKS))


def test_the_good_notebook_keeps_every_rule(good):
    assert anatomy.complaints(*good) == []


def test_every_fault_breaks_its_rule_and_no_other(good):
    assert set(FAULTS) == set(anatomy.RULES), "each rule needs a notebook that breaks it"
    notebook, path = good
    for rule, faults in FAULTS.items():
        for number, fault in enumerate(faults):
            broken = copy.deepcopy(notebook)
            fault(broken)
            found = [name for name, check in anatomy.RULES.items() if check(broken, path)]
            assert found == [rule], f"fault {number} of {rule} breaks {found}"
