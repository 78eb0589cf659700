"""The bits of lesson 1, as a learner without a mouse meets them."""

from importlib import import_module

import pytest
from support.figures import EXAMPLES, html

figure = import_module("amp_utils.touch.bits")  # the function hides the module
full = pytest.mark.full


def test_the_drawing_without_script_writes_every_bit():
    drawn = figure.still(-1.6)
    for fmt in figure.FORMATS.values():
        pattern = f"{fmt.encode(-1.6):0{fmt.bits}b}"
        sign, exponent, mantissa = (f">{part}</text>" for part in cut(pattern, fmt.exponent_bits))
        assert sign in drawn and exponent in drawn and mantissa in drawn
    assert "-1.60000002<" in drawn and ">-1.5<" in drawn


def cut(pattern: str, exponent_bits: int) -> tuple[str, str, str]:
    return pattern[0], pattern[1 : 1 + exponent_bits], pattern[1 + exponent_bits :]


@pytest.fixture
def page(opened):
    return opened(html(EXAMPLES["bits"]))


def typed(page, words: str) -> str:
    """Type a number; what is said of it."""
    page.get_by_role("textbox", name="number").fill(words)
    page.keyboard.press("Enter")
    return page.get_by_role("status").inner_text()


@full
def test_a_number_is_typed_and_its_fate_is_told(page):
    assert typed(page, "5") == "fp16 has 5: a normal number."
    assert typed(page, "1/3").startswith(
        "0.3333333333333333 becomes 0.333251953125 in fp16, a norm"
    )
    assert typed(page, "2^-24") == "fp16 has 5.960464477539063e−8: a subnormal number."
    assert typed(page, "65520") == "65520 becomes ∞ in fp16: too large."
    assert typed(page, "1e-9").endswith("becomes 0 in fp16: too small.")
    assert typed(page, "-inf") == "fp16 has −∞: infinity."
    assert page.get_by_text("infinity", exact=True).is_visible()
    assert typed(page, "five") == "“five” is no number."
    assert page.get_by_role("textbox").get_attribute("aria-invalid") == "true"


@full
def test_the_arrow_keys_step_to_the_neighbours(page):
    typed(page, "2048")
    page.keyboard.press("ArrowUp")
    assert page.get_by_role("textbox").input_value() == "2050"
    page.get_by_role("button", name="down to 2048").press("Enter")
    page.get_by_role("button", name="down to 2047").press("Enter")
    assert page.get_by_role("textbox").input_value() == "2047"


@full
def test_a_bit_is_flipped_with_the_keyboard(page):
    typed(page, "1")
    page.get_by_role("button", name="sign bit").focus()
    page.keyboard.press("ArrowRight")
    top = page.get_by_role("button", name="exponent bit worth 16")
    assert top.get_attribute("aria-pressed") == "false"
    page.keyboard.press("Space")
    assert top.get_attribute("aria-pressed") == "true"
    assert page.get_by_role("status").inner_text() == "fp16 has ∞: infinity."
    page.keyboard.press("End")
    page.keyboard.press("Space")
    assert page.get_by_role("status").inner_text() == "fp16 has NaN: NaN."
    assert page.get_by_role("radio", name="fp4 e2m1: no NaN").is_disabled()


@full
def test_another_format_rounds_what_was_typed_and_not_what_was_left_of_it(page):
    typed(page, "0.1")
    page.get_by_role("radio", name="fp4 e2m1: 0").check()
    assert page.get_by_role("status").inner_text() == "0.1 becomes 0 in fp4 e2m1: too small."
    page.keyboard.press("ArrowUp")
    assert page.get_by_role("status").inner_text().startswith("0.1 becomes 0.09375 in fp8 e5m2")
    assert page.get_by_role("button", name="mantissa bit").count() == 2
