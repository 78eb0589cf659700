"""Figures in JupyterLab: alive where the notebook is trusted, still drawings where it is not."""

import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from support.browser import jupyterlab
from support.figures import EXAMPLES, KEYS, html

pytestmark = pytest.mark.full
TALL = {"viewport": {"width": 1200, "height": 900 * len(EXAMPLES)}}  # so that no cell is left out
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}


@pytest.fixture
def lab(browser, tmp_path):
    """A running JupyterLab, and a notebook there with every figure as a saved output."""
    cells = []
    for example in EXAMPLES.values():
        shown = new_output("display_data", {"text/html": html(example), "text/plain": "figure"})
        cells.append(new_code_cell("1", outputs=[shown], execution_count=1))
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), tmp_path / "figures.ipynb")
    with jupyterlab(tmp_path) as running:
        yield running


def figures(page):
    outputs = page.locator(".jp-Notebook .jp-RenderedHTML")
    outputs.nth(len(EXAMPLES) - 1).wait_for()
    return zip(EXAMPLES, outputs.all(), strict=True)


def test_untrusted_a_figure_is_a_drawing_and_trusted_it_is_alive(lab, opened):
    page = opened(address=f"{lab.address}/lab/tree/figures.ipynb?reset", **TALL)
    for name, output in figures(page):
        picture = output.get_by_role("img")
        assert picture.is_visible() and len(picture.get_attribute("alt")) > 40, name
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 200, name
        assert output.inner_text().strip() == "" and not output.locator("script").count(), name

    page.close()

    subprocess.run(
        [sys.executable, "-m", "jupyter", "trust", lab.folder / "figures.ipynb"],
        env=lab.environment,
        check=True,
        capture_output=True,
    )
    page = opened(address=f"{lab.address}/lab/tree/figures.ipynb?reset", **TALL)
    for name, output in figures(page):
        output.get_by_role("status").wait_for()
        assert not output.locator("img").is_visible(), name
        control = output.locator("input, select, button").first
        control.focus()
        before = output.get_by_role("status").inner_text()
        page.keyboard.press(KEYS.get(control.evaluate("node => node.type"), "Enter"))
        assert output.get_by_role("status").inner_text() != before, f"{name}: nothing happened"
        if control.evaluate("node => node.type !== 'text'"):
            page.keyboard.press("b")  # in JupyterLab's command mode: a new cell below
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == len(EXAMPLES)
    change = "theme => jupyterapp.commands.execute('apputils:change-theme', {theme})"
    for theme, dark in (("JupyterLab Dark", True), ("JupyterLab Light", False)):
        page.evaluate(change, theme)
        changed = f".touch{'[data-dark]' if dark else ':not([data-dark])'}"
        page.locator(changed).nth(len(EXAMPLES) - 1).wait_for()
