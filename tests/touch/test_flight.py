"""The flight simulator flies as torch's scaler does, to the bit, and judges a drawing."""

import math
import random
from importlib import import_module

import pytest
from support.figures import flight, html

simulator = import_module("amp_utils.touch.flight")
full = pytest.mark.full


def schedule() -> tuple[dict, float, list[bool]]:
    """Settings of a scaler, a ceiling, and 24 batches, some or all of them bad."""
    odd = random.random() < 0.5
    settings = {
        "init_scale": 2.0 ** random.randint(-149, 127) * (random.uniform(1, 1.9) if odd else 1),
        "growth_factor": random.uniform(1.1, 9) if odd else 2.0,
        "backoff_factor": random.uniform(0.01, 0.9) if odd else 0.5,
        "growth_interval": random.choice([1, 2, 3, 8, 2000]),
    }
    share = random.choice([0, 0.1, 0.5, 1])
    return settings, 2.0 ** random.randint(-140, 127), [random.random() < share for _ in range(24)]


@full
def test_a_thousand_flights_are_those_of_torch_to_the_bit(arithmetic):
    run, flights = arithmetic("flight"), [schedule() for _ in range(1000)]
    given = [
        [
            {
                "scale": settings["init_scale"],
                "growth": settings["growth_factor"],
                "backoff": settings["backoff_factor"],
                "interval": settings["growth_interval"],
                "ceiling": ceiling,
            },
            bad,
        ]
        for settings, ceiling, bad in flights
    ]
    flown = run("given.map(([settings, bad]) => fly(settings, bad))", given)
    ends = set()
    for rows, (settings, ceiling, bad) in zip(flown, flights, strict=True):
        torchs = simulator.fly(bad, ceiling, **settings)
        # As text, in which NaN equals NaN; every other float has a text of its own.
        mine = [str((float(row["scale"]), row["inf"], float(row["weight"]))) for row in rows]
        assert mine == list(map(str, torchs)), settings
        ends.add(torchs[-1][2])
    assert -math.inf in ends and any(map(math.isnan, ends)), "no scale died"


@full
def test_a_drawing_is_compared_with_the_flight_by_keyboard_alone(opened):
    page = opened(html(flight))
    said, step = page.get_by_role("status"), page.get_by_role("slider", name="step", exact=True)
    mine, fly = (
        page.get_by_role("slider", name="your scale from here"),
        page.get_by_role("button", name="Fly"),
    )
    fly.press("Enter")
    assert "first differs at step 9." in said.inner_text()  # growth_interval is 8
    for at, presses in ((9, ["ArrowRight"]), (17, ["ArrowRight"]), (21, ["ArrowLeft"])):
        step.fill(str(at))
        for press in presses:
            mine.press(press)
    assert "first differs at step 29." in said.inner_text()
    step.fill("5")
    page.get_by_role("button", name="infinite batch here").press("Space")
    assert "first differs at step 6." in said.inner_text()


@full
def test_a_flight_can_die_and_a_pointer_draws(opened):
    page = opened(html(flight), viewport={"width": 800, "height": 700})
    for name, value in (("init_scale", -60), ("infinite batches", 1)):
        page.get_by_role("slider", name=name).fill(str(value))
    page.get_by_role("button", name="Fly").click()
    said = page.get_by_role("status")
    assert "skipped 60 of 60" in said.inner_text() and "nothing was learned" in said.inner_text()
    page.get_by_role("slider", name="infinite batches").fill("0")
    plane = page.locator(".picture").bounding_box()
    page.mouse.click(plane["x"] + plane["width"] - 3, plane["y"] + 20)
    assert page.get_by_role("slider", name="step", exact=True).input_value() == "60"
    assert page.get_by_role("slider", name="your scale from here").input_value() != "-60"


def test_the_drawing_that_stands_still_tells_of_the_same_flight():
    rows = simulator.fly(
        [i == 19 for i in range(60)], 2.0**36, init_scale=2.0**32, growth_interval=8
    )
    skipped = sum(inf for _, inf, _ in rows)
    assert f"{skipped} of 60 steps are skipped, the first is step 20." in html(flight)
