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


draw = script("draw")


@pytest.mark.parametrize("picture", draw.PICTURES, ids=lambda picture: picture.__name__)
def test_a_picture_is_drawn_again_byte_for_byte(picture, tmp_path):
    path = draw.draw(picture, tmp_path)
    assert path.read_bytes() == (IMGS / path.name).read_bytes(), "run python imgs/draw.py"


def test_every_picture_has_a_script():
    drawn = {f"{picture.__name__}.svg" for picture in draw.PICTURES} | {"learning.svg"}
    assert {path.name for path in IMGS.glob("*.svg")} == drawn


def test_the_pictures_are_whole_and_refer_to_nothing_outside():
    for path in IMGS.glob("*.svg"):
        text = path.read_text("utf-8")
        assert text.rstrip().endswith("</svg>")
        assert "<image" not in text or "data:image/png;base64" in text
