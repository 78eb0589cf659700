"""The weight and its updates of lesson 1, as a learner with and without a mouse meets them."""

from importlib import import_module

import numpy as np
import pytest
from support.figures import EXAMPLES, html

from amp_utils import touch

race = import_module("amp_utils.touch.updates").race  # touch.updates is the function
full = pytest.mark.full


def test_a_figure_that_the_controls_cannot_reach_is_refused():
    for wrong in ({"weight": 3000.0}, {"weight": -1.0}, {"update": 2.0}, {"times": 500}):
        with pytest.raises(ValueError, match=str(*wrong.values())):
            touch.updates(**wrong)


def test_float32_adds_the_update_that_the_figure_names():
    total = np.float32(1)
    for _ in range(1000):
        total += np.float32(0.003)
    assert race(1.0, [0.003] * 1000)["fp32"][-1] == total


@pytest.fixture
def page(opened):
    return opened(html(EXAMPLES["updates"]), viewport={"width": 800, "height": 600})


def said(page) -> str:
    return page.get_by_role("status").inner_text()


def press(page, name: str, key: str, until: str) -> None:
    slider = page.get_by_role("slider", name=name)
    for _ in range(100):
        if slider.get_attribute("aria-valuetext") == until:
            return
        slider.press(key)
    raise AssertionError(f"the slider {name} never says {until}")


@full
def test_the_keyboard_finds_the_largest_update_that_is_lost(page):
    press(page, "update", "ArrowRight", "0.005")
    assert said(page).startswith("bf16: 1 + 0.005 becomes 1.0078125.")
    page.get_by_role("slider", name="update").press("ArrowLeft")
    assert said(page).startswith("bf16: 1 + 2⁻⁸ is rounded back to 1: the update is lost.")
    press(page, "update", "ArrowLeft", "−0.002")
    assert said(page).startswith("bf16: 1 − 0.002 becomes 0.99609375.")
    page.get_by_role("slider", name="update").press("ArrowRight")
    assert said(page).startswith("bf16: 1 − 2⁻⁹ is rounded back to 1: the update is lost.")


@full
def test_the_sums_race_and_two_get_stuck(page):
    assert said(page).endswith(
        "After 1,000 such updates: fp32 4, bf16 1 (stuck from addition 1 on), fp16 4.5703, "
        "fp16 + Kahan 4."
    )
    press(page, "weight", "ArrowLeft", "0")
    press(page, "update", "ArrowRight", "1")
    page.get_by_role("combobox", name="additions").select_option("10,000")
    page.get_by_role("button", name="race").press("Enter")
    assert said(page).endswith(
        "After 10,000 such updates: fp32 10000, bf16 256 (stuck from addition 257 on), "
        "fp16 2048 (stuck from addition 2049 on), fp16 + Kahan 10000."
    )


@full
def test_the_update_is_dragged_on_the_number_line(page):
    line = page.locator("svg").first.bounding_box()
    middle, y = line["x"] + line["width"] / 2, line["y"] + 100
    page.mouse.move(middle, y)
    page.mouse.down()
    page.mouse.move(middle + 60, y, steps=3)
    assert page.get_by_role("slider", name="update").get_attribute("aria-valuetext") == "2⁻⁶"
    page.mouse.move(middle - 60, y, steps=3)
    page.mouse.up()
    page.mouse.move(middle, y)
    assert page.get_by_role("slider", name="update").get_attribute("aria-valuetext") == "−2⁻⁶"
    assert said(page).startswith("bf16: 1 − 2⁻⁶ becomes 0.984375.")
