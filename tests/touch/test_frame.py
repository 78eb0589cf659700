"""What holds for every figure to touch, wherever it is read."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from support.browser import violations
from support.figures import EXAMPLES, KEYS, html

from amp_utils import touch
from amp_utils.course import notebook, pages, slides
from amp_utils.touch import frame

full = pytest.mark.full
every_figure = pytest.mark.parametrize("name", EXAMPLES)


def test_every_figure_is_tested():
    scripts = {path.stem for path in Path(touch.__file__).parent.glob("*.js")} - {"frame", "floats"}
    assert set(EXAMPLES) == set(touch.__all__) == scripts


@every_figure
def test_a_figure_is_small_and_the_same_in_every_run(name):
    shown = html(EXAMPLES[name])
    assert shown == html(EXAMPLES[name])
    assert len(shown.encode()) <= 25_000
    assert not re.search(r"\bid=|Math\.random|Date\b|\bimport\b|fetch\(|src=\"(?!data:)", shown)
    assert shown.count("<script") == shown.count("</script") == 1


@full
@every_figure
def test_without_a_script_the_drawing_is_seen_and_described(opened, name):
    page = opened(html(EXAMPLES[name]), java_script_enabled=False)
    picture = page.get_by_role("img")
    assert picture.is_visible() and len(picture.get_attribute("alt")) > 40
    size = picture.bounding_box()
    assert size["width"] > 200 and size["height"] > 100, "the drawing is broken"


@full
@every_figure
def test_with_a_script_the_figure_takes_its_place_and_has_its_result_in_words(opened, name):
    page = opened(html(EXAMPLES[name]))
    assert not page.locator("img").is_visible()
    assert page.get_by_role("status").inner_text().endswith(".")
    assert page.get_by_role("group").first.get_attribute("aria-label")
    controls = page.locator("input, select, button").all()
    assert controls and all(accessible_name(control) for control in controls)


def accessible_name(control) -> str:
    return control.evaluate("node => node.ariaLabel || (node.labels?.[0] ?? node).innerText.trim()")


@full
@every_figure
@pytest.mark.parametrize("width", [1000, 320])
def test_a_figure_fits_a_desk_and_a_phone_in_light_and_dark(opened, name, width):
    for scheme, dark in (("light", False), ("dark", True)):
        viewport = {"width": width, "height": 800}
        page = opened(
            "<style>:root { color-scheme: light dark }</style>" + html(EXAMPLES[name]),
            viewport=viewport,
            color_scheme=scheme,
        )
        page.get_by_role("status").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (page.locator(".touch").get_attribute("data-dark") is not None) == dark


@full
@every_figure
def test_the_keyboard_reaches_every_control_and_the_focus_is_seen(opened, name):
    page = opened(html(EXAMPLES[name]))
    page.get_by_role("status").wait_for()
    controls = page.locator("input, select, button").and_(page.locator(":not([tabindex='-1'])"))
    groups = controls.evaluate_all(
        "nodes => new Set(nodes.map((node, i) => node.type === 'radio' ? node.name : i)).size"
    )
    reached = set()
    for _ in range(groups):
        page.keyboard.press("Tab")
        focused = "document.querySelector('.touch').shadowRoot.activeElement"
        assert page.evaluate(f"{focused} !== null"), "Tab leaves the figure too early"
        assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
        reached.add(
            page.evaluate(f"[...{focused}.getRootNode().querySelectorAll('*')].indexOf({focused})")
        )
    assert len(reached) == groups


@full
@every_figure
def test_two_copies_side_by_side_are_independent(opened, name):
    figure = html(EXAMPLES[name])
    page = opened(figure + figure)
    first, second = page.locator(".touch").all()
    before = second.inner_text(), first.get_by_role("status").inner_text()
    control = first.locator("input, select, button").first
    control.focus()
    page.keyboard.press(KEYS.get(control.evaluate("node => node.type"), "Enter"))
    assert second.get_by_role("status").inner_text() == before[1]
    assert first.get_by_role("status").inner_text() != before[1], "nothing happened"


@full
@every_figure
def test_a_figure_is_accessible(opened, name):
    dark = "@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } }"
    page = opened(f"<style>{dark}</style>{html(EXAMPLES[name])}")
    page.get_by_role("status").wait_for()
    assert violations(page, ".touch") == ""


@full
def test_every_figure_lives_in_an_offline_page(opened):
    """nbconvert keeps the scripts; in a folded output a figure is drawn when it is unfolded."""
    shown = {name: {"text/html": html(example)} for name, example in EXAMPLES.items()}
    cells = [
        new_code_cell(name, outputs=[new_output("display_data", data)])
        for name, data in shown.items()
    ]
    cells[0].metadata["jupyter"] = {"outputs_hidden": True}
    body = pages.cells(new_notebook(cells=cells), Path(), True)
    page = opened(pages.page("lesson.html.j2", title="figures", body=body))
    page.locator("details.answer summary").click()
    for name, figure in zip(EXAMPLES, page.locator(".touch").all(), strict=True):
        figure.locator(".picture > :not(style)").first.wait_for()
        size = figure.locator(".picture").bounding_box()
        assert size["width"] > 200 and size["height"] > 50, name


@full
def test_in_a_slide_a_figure_keeps_its_keys_and_without_focus_they_turn_slides(visit, tmp_path):
    figure = f"<div>{html(EXAMPLES['loss_scale'])}</div>"
    columns = [[figure], ["next"]]
    deck = pages.page("slides.html.j2", title="t", columns=columns, reveal=slides.REVEAL)
    (tmp_path / "deck.html").write_text(deck, "utf-8")
    page = visit(tmp_path / "deck.html")
    slider = page.get_by_role("slider")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.input_value() == "1" and page.evaluate("Reveal.getIndices().h") == 0
    slider.blur()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("Reveal.getIndices().h") == 1


def test_the_figures_in_the_lessons_are_made_from_the_files_as_they_are():
    """Also where nbval compares nothing, as what was measured differs by machine."""
    found = set()
    for path in notebook.lessons(Path(__file__).parents[2] / "notebooks"):
        for cell in nbformat.read(path, 4).cells:
            called = re.findall(r"^touch\.(\w+)\(", cell.source, re.M)
            for name in called if cell.cell_type == "code" else ():
                saved = "".join(
                    output.get("data", {}).get("text/html", "") for output in cell.outputs
                )
                made_from = [frame._source(f"{part}.js") for part in ("frame", name)]
                assert all(source in saved for source in made_from), f"make save NB={path.stem[:2]}"
                found.add(name)
    assert found == set(EXAMPLES)
