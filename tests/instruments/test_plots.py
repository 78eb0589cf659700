"""Figures draw the data they are given: nbval does not compare pictures, so it is checked here."""

import math

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.colors import to_hex

from amp_utils import plots
from amp_utils.formats import FP16, FP32

matplotlib.use("Agg")


@pytest.fixture
def drawn(monkeypatch):
    """Collects (figure, alt) instead of displaying."""
    figures = []
    monkeypatch.setattr(plots, "show", lambda figure, alt: figures.append((figure, alt)))
    yield figures
    plt.close("all")


def test_a_shown_figure_carries_its_description_and_is_closed(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, raw, metadata: shown.append((data, metadata))
    )
    plots.curves({"fp32": [1.0, 0.5]}, title="t", xlabel="x", ylabel="y", alt="a falling line")
    ((data, metadata),) = shown
    assert data["text/plain"].splitlines() == ["[figure]", "a falling line"]
    assert metadata["image/png"]["alt"] == "a falling line"
    assert data["image/png"].startswith("iVBOR")  # the PNG signature in base64
    assert not plt.get_fignums()


def test_curves_hold_the_values_and_leave_gaps_for_infinities(drawn):
    plots.curves(
        {"fp32": [1.0, 0.5], "fp16": [math.inf, 0.25]}, title="t", xlabel="x", ylabel="y", alt="a"
    )
    lines = drawn[0][0].axes[0].lines
    assert list(lines[0].get_ydata()) == [1.0, 0.5]
    assert math.isnan(lines[1].get_ydata()[0]) and lines[1].get_ydata()[1] == 0.25
    assert lines[0].get_linestyle() != lines[1].get_linestyle(), (
        "to be told apart in black and white"
    )


def test_curves_stand_at_their_x_and_what_is_in_dots_is_not_joined(drawn):
    data = {"seen": [5.0, 7.0], "fitted": [6.0, 6.0]}
    words = {"title": "t", "xlabel": "x", "ylabel": "y", "alt": "a", "log": False}
    plots.curves(data, x=[-10.0, 10.0], dots=["seen"], **words)
    seen, fitted = drawn[0][0].axes[0].lines[:2]
    assert list(seen.get_xdata()) == list(fitted.get_xdata()) == [-10, 10]
    assert (seen.get_linestyle(), seen.get_marker()) == ("None", ".")
    assert fitted.get_linestyle() != "None" and fitted.get_marker() == "None"
    plots.curves({"up": [1.0, 2.0]}, x=[10, 100], log_x=True, **words)
    assert [figure.axes[0].get_xscale() for figure, *_ in drawn] == ["linear", "log"]


def test_a_spread_is_shaded_from_its_lower_to_its_upper_line(drawn):
    words = {"title": "t", "xlabel": "x", "ylabel": "y", "alt": "a", "log": False}
    plots.curves({"up": [1.0, 2.0], "no": [3.0, 3.0]}, spread={"up": ([0.5, 1.5], [4, 5])}, **words)
    (band,) = drawn[0][0].axes[0].collections
    assert {1.5, 5.0} <= set(band.get_paths()[0].vertices[:, 1])
    assert to_hex(band.get_facecolor()[0]) == to_hex(drawn[0][0].axes[0].lines[0].get_color())


def test_each_curve_is_named_in_the_margin_where_it_ends_and_no_two_names_overlap(drawn):
    falling, rising = [1.0, 0.5, 0.01], [0.01, 0.5, 1.0]
    ends = {"fp32": falling, "bf16": falling, "up": rising, "high": [1.0], "gone": [math.nan]}
    plots.curves(ends, title="t", xlabel="x", ylabel="y", alt="a")
    axes = drawn[0][0].axes[0]
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert sorted(heights.values()) == pytest.approx([0, 0.09, 0.18, 0.86, 0.95])
    assert heights["fp32"] < 0.2 < 0.8 < heights["up"]
    assert all(text.get_position()[0] > 1 for text in axes.texts) and axes.get_legend() is None
    samples = {line.get_ydata()[0]: line for line in axes.lines[5:]}
    for line in axes.lines[:5]:
        sample = samples[heights[line.get_label()]]
        assert sample.get_color() == line.get_color()
        assert sample.get_linestyle() == line.get_linestyle()


def test_images_show_each_picture_under_its_name(drawn):
    picture = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    plots.images(
        {"fp32": {"one": picture, "two": 1 - picture}, "fp16": {"one": picture}}, title="t", alt="a"
    )
    titles = [axes.get_title(loc="center") for axes in drawn[0][0].axes]
    assert titles == ["one", "two", "one", ""]
    assert (drawn[0][0].axes[1].images[0].get_array() == (1 - picture).numpy()).all()


def test_range_bars_end_at_the_largest_value(drawn):
    plots.range_bars([FP16, FP32], title="t", alt="a")
    normal, subnormal = drawn[0][0].axes[0].patches[:2]
    assert normal.get_x() + normal.get_width() == pytest.approx(math.log2(65504))
    assert subnormal.get_x() == -24


def test_the_number_line_has_a_stroke_for_each_number(drawn):
    plots.number_line({"a": [1, 2.5], "b": [4]}, ticks=[1, 2, 4], title="t", alt="a")
    axes = drawn[0][0].axes[0]
    strokes = [[segment[0, 0] for segment in row.get_segments()] for row in axes.collections]
    assert strokes == [[1, 2.5], [4]]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "4"]


def test_the_number_line_has_a_mark_and_the_colors_that_are_asked_for(drawn):
    for colors, expected in (({}, plots.BLACK), ({"tf32": plots.RED}, plots.RED)):
        plots.number_line({"tf32": [1]}, ticks=[0, 2], mark=1.5, colors=colors, title="t", alt="a")
        axes = drawn[-1][0].axes[0]
        assert axes.lines[-1].get_xdata() == [1.5, 1.5]
        assert to_hex(axes.collections[0].get_color()[0]) == to_hex(expected)


def test_the_number_line_tells_the_first_numbers_of_all_rows_from_the_second_ones(drawn):
    rows = {"a": [1, 2], "b": [3, 1]}
    plots.number_line(rows, ticks=[1, 3], symbols="os", xlabel="times", title="t", alt="a")
    axes = drawn[0][0].axes[0]
    points = [
        (*line.get_xdata(), line.get_marker()) for line in axes.lines if line.get_marker() in "os"
    ]
    assert points == [(1, "o"), (2, "s"), (3, "o"), (1, "s")] and axes.get_xlabel() == "times"
    assert not axes.collections


def test_on_the_number_line_a_row_without_numbers_is_a_heading_and_the_axis_may_be_logarithmic(
    drawn,
):
    rows, look = {"HEADING": [], "a": [2]}, {"title": "t", "alt": "a"}
    plots.number_line(rows, ticks=[1, 4], symbols="o", log=True, row=1.0, **look)
    figure, axes = drawn[0][0], drawn[0][0].axes[0]
    assert [list(line.get_ydata()) for line in axes.lines] == [[-1, -1], [-1]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["HEADING", "a"]
    assert axes.get_xscale() == "log" and figure.get_figheight() == pytest.approx(2.9)
    assert [label.get_text() for label in axes.get_xticklabels(which="both")] == ["1", "4"]


def test_the_scale_history_marks_skipped_steps_and_draws_errors_beneath(drawn):
    skipped, errors = [False, True, False], {"one": [3.0, 2.0, 1.0], "two": [3.0, 3.0, 3.0]}
    plots.scale_history([4.0, 4.0, 2.0], skipped, errors, title="t", alt="a")
    assert drawn[0][0].axes[1].get_yscale() == "log"
    (line, marks, *_), beneath = drawn[0][0].axes[0].lines, drawn[0][0].axes[1].lines
    assert [list(curve.get_ydata()) for curve in beneath[:2]] == list(errors.values())
    assert list(line.get_ydata()) == [4.0, 4.0, 2.0]
    assert list(marks.get_xdata()) == [2]
