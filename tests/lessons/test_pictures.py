"""The pictures in imgs/ are what their scripts draw."""

import importlib.util
from pathlib import Path

import pytest

IMGS = Path(__file__).parents[2] / "imgs"


def script(name):
    spec = importlib.util.spec_from_file_location(name, IMGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def draw():
    return script("draw")


def test_every_picture_is_drawn_again_byte_for_byte(draw, tmp_path):
    drawn = [draw.draw(picture, tmp_path) for picture in draw.PICTURES]
    for path in drawn:
        same = path.read_bytes() == (IMGS / path.name).read_bytes()
        assert same, f"{path.name} differs: run python imgs/draw.py"
    assert {path.name for path in IMGS.glob("*.svg")} == {
        "learning.svg",
        *(path.name for path in drawn),
    }


def test_the_readmes_picture_can_be_drawn_from_lesson_5(tmp_path):
    text = script("learning").draw(tmp_path, steps=20).read_text("utf-8")
    assert text.count("<image") == 4 and "fp16, loss × 2¹⁶" in text


def test_the_pictures_are_whole_and_refer_to_nothing_outside():
    for path in IMGS.glob("*.svg"):
        text = path.read_text("utf-8")
        assert text.rstrip().endswith("</svg>"), path.name
        assert "<image" not in text or "data:image/png;base64" in text, path.name
