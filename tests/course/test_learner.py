"""A learner's first hour in a real browser: what can be seen on the page, and nothing else."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import LIMIT, answers, free_ports, stop_server, wait_for

from amp_utils.course import lab

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.full


@pytest.fixture
def course(tmp_path) -> Path:
    """A course whose copies, settings, trust and kernels have a place of their own."""
    for name in ("notebooks", "imgs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def address(course) -> Iterator[str]:
    """Where `make lab` says that the course is, once it answers there."""
    own = {f"JUPYTER_{name}_DIR": str(course / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"IPYTHONDIR": str(course / "ipython"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "amp_utils.course", "--root", course, "lab", "--no-browser"]
    command += ["--port", str(free_ports(1)[0])]  # two servers that start at once may take the same
    with (course / "said").open("w") as out:
        pipes = {"stdout": out, "stderr": out, "start_new_session": True}
        opened = subprocess.Popen(command, cwd=course, env=os.environ | own, **pipes)
    try:
        said = r"http://127\S+token=\w{32,}"
        found = wait_for(lambda: re.search(said, (course / "said").read_text())).group()
        wait_for(lambda: answers(found))
        yield found
    finally:
        stop_server(opened)


class Reader:
    """Hands and eyes of a learner in JupyterLab."""

    def __init__(self, page):
        self.page = page
        page.set_default_timeout(LIMIT * 1000)

    def sees(self, text: str) -> None:
        """Wait until a text is on the page, and look at it."""
        found = self.page.get_by_text(text).locator("visible=true").first
        found.wait_for()
        found.scroll_into_view_if_needed()

    def cell(self, text: str):
        """The cell in which a text stands, on the screen."""
        found = self.page.locator(".jp-Cell").filter(has_text=text).locator("visible=true").first
        found.scroll_into_view_if_needed()
        return found

    def reads_below(self, text: str, output: str) -> None:
        """Wait until the cell in which `text` stands shows `output`."""
        self.cell(text).get_by_text(output).wait_for()

    def unfolds(self, text: str, inside: str) -> None:
        """Click on the first line of something folded, and see what was inside."""
        folded = self.page.get_by_text(inside).locator("visible=true")
        assert not folded.count(), f"{inside!r} is seen without unfolding"
        self.page.get_by_text(text, exact=True).locator("visible=true").first.click()
        self.sees(inside)

    def follows(self, link: str) -> None:
        """Click on a link."""
        self.page.get_by_role("link", name=link).first.click()

    def presses(self, key: str, role: str, name: str) -> None:
        """Press a key on a control of a figure to touch."""
        self.page.get_by_role(role, name=name).locator("visible=true").first.press(key)

    def writes(self, text: str, *lines: str) -> None:
        """Put lines in the place of all that stands in the cell with this text."""
        self.cell(text).get_by_text(text).first.click()
        self.page.keyboard.press("ControlOrMeta+a")
        for number, line in enumerate(lines):
            if number:
                self.page.keyboard.press("Enter")
                self.page.keyboard.press("Shift+Home")  # whatever was indented by itself
            self.page.keyboard.type(line)

    def runs(self, cells: int = 1) -> None:
        """Run this cell and the next ones, as lesson 0 says."""
        for _ in range(cells):
            self.page.keyboard.press("Shift+Enter")

    def runs_all(self) -> None:
        """Run All from the menu once the kernel is there, until no cell waits any more."""
        ready = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
        self.page.locator(ready).locator("visible=true").wait_for()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        waiting = self.page.get_by_text("[*]:").locator("visible=true")
        waiting.first.wait_for()
        wait_for(lambda: not waiting.count())
        assert not self.page.get_by_text("Traceback (most recent call last)").count()


def test_a_learner_guesses_solves_unfolds_and_sees_the_progress(browser, address, course):
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    reader = Reader(page)
    page.goto(address)
    reader.sees("0 · Start here")

    reader.runs_all()
    reader.reads_below("lesson.predict(guess_left", "✎ make your guess first")
    reader.writes("guess_left = None", 'guess_left = ["half", "half", "half"]')
    reader.runs(2)
    reader.reads_below("lesson.predict(guess_left", "✗ you predicted ['half', 'half', 'half']")
    reader.writes("guess_low = None", 'guess_low = ["output", "output.grad"]')
    reader.runs(2)
    reader.reads_below("lesson.predict(guess_low", "✓ as you predicted: ['output', 'output.grad']")

    reader.reads_below("@lesson.check", "✎ not attempted yet")
    reader.unfolds("Hint", "What two things must hold for each element?")
    reader.unfolds("# Solution of exercise 1", "good.append(factor)")
    reader.writes(
        "raise NotImplementedError",
        "def good_factors():",
        "    grads = {2**k: first_step(torch.float16, 2**k)['output.grad'] for k in range(41)}",
        "    return [k for k, g in grads.items() if (g.isfinite() & (g != 0)).all()]",
    )
    reader.runs(2)
    reader.reads_below("@lesson.check", "✓ correct")

    reader.follows("5 · Gradient underflow")  # its figure is trusted, and alive before any cell ran
    reader.presses("ArrowRight", "slider", "loss scale")
    reader.sees("Loss scale 2¹: of")

    reader.follows("6 · The GradScaler")
    reader.sees("Four calls, one at a time")
    reader.writes("guess_weight = None", "guess_weight = 1.5")
    reader.writes("guess_scale = None", "guess_scale = 256")
    reader.runs_all()
    reader.reads_below("lesson.predict(guess_weight", "✗ you predicted 1.5; measured: 1.7")
    reader.reads_below("lesson.predict(guess_scale", "✓ as you predicted: 256")
    reader.reads_below("touch.flight(init_scale", "Your staircase (the thick line) begins at")
    reader.presses("PageDown", "slider", "ceiling")
    reader.presses("Enter", "button", "Fly")
    reader.sees("The scaler (blue) skipped")
    reader.reads_below("@lesson.check", "✎ not attempted yet")

    command = [sys.executable, "-m", "amp_utils.course", "--root", course, "progress"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if " of " in line}
    assert rows["00_start_here"][::3] == ["1", "1"]  # one exercise, one right guess
    assert rows["06_grad_scaler"][::3] == ["0", "1"]
    assert "learn/00_start_here.ipynb: How much of its first loss is left" in table
    assert "learn/06_grad_scaler.ipynb: `unscale_` has divided the gradient" in table
    assert table.endswith("Next: learn/00_start_here.ipynb\n")


def test_opening_and_saving_a_lesson_is_no_touch(browser, address, course):
    name = "05_gradient_underflow.ipynb"
    copy, original = course / "learn" / name, ROOT / "notebooks" / name
    page = browser.new_page()
    page.goto(address.replace("00_start_here.ipynb", name))
    page.get_by_text("| Idle").wait_for(timeout=LIMIT * 1000)
    page.keyboard.press("ControlOrMeta+s")
    wait_for(lambda: copy.read_bytes() != original.read_bytes())  # JupyterLab's own metadata
    wait_for(lambda: lab.fingerprint(copy.read_bytes()) == lab.fingerprint(original.read_bytes()))
