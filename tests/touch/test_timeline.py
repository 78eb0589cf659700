"""The timeline's numbers and errors are those of a real run with torch's scaler."""

import itertools
import random
from importlib import import_module

import pytest
from support.figures import html, timeline

figure = import_module("amp_utils.touch.timeline")
full = pytest.mark.full


@full
@pytest.mark.parametrize("growth_interval", [1, 2, 2000])
def test_every_arrangement_of_a_sample_runs_as_with_torch(arithmetic, growth_interval):
    every = list(itertools.product([False, True], repeat=16))
    sample = [[row[j : j + 4] for j in (0, 4, 8, 12)] for row in random.sample(every, 250)]
    run = arithmetic("timeline")
    given = [sample, figure.SCALE, growth_interval]
    ours = run("given[0].map(pressed => run(pressed, given[1], given[2]))", given)
    messages, seen = {k: figure.message(calls) for k, calls in figure.ERRORS.items()}, set()
    for rows, pressed in zip(ours, sample, strict=True):
        mine = [
            (row["batch"], row["call"], row["grad"], row["scale"], messages.get(row["error"], ""))
            for row in rows
        ]
        torchs = figure.run(pressed, growth_interval)
        assert mine == [row._replace(grad=row.grad or 0) for row in torchs], pressed
        seen.add(torchs[-1].error)
        for row in rows:
            assert row["grad"] == pytest.approx(sum(row["members"]), rel=1e-6)
    assert seen == {*messages.values(), ""}, "an error was never met"


def test_torch_says_something_else_to_each_mistake():
    said = [figure.message(calls) for calls in figure.ERRORS.values()]
    assert all(said) and len(set(said)) == len(said)


@full
def test_the_lesson_s_mistake_by_keyboard_alone(opened):
    page = opened(html(timeline))
    said = page.get_by_role("status")
    assert said.inner_text() == "No step: .grad ends as 4096."
    page.get_by_role("button", name="step after micro-batch 4").press("Enter")
    assert said.inner_text() == (
        "The step after micro-batch 4 gets 1 + 1 + 1 + 1 = 4, as it should. "
        "For a next group, .grad is still 4 and the scaler waits for update."
    )
    page.get_by_role("button", name="unscale_ after micro-batch 1").press("Enter")
    assert "gets 1 + 1024 + 1024 + 1024 = 3073; right is 4." in said.inner_text()
    page.get_by_role("button", name="unscale_ after micro-batch 2").press("Space")
    assert said.inner_text().endswith(figure.message(["unscale_", "unscale_"]))
    assert page.locator("td", has_text="error").count() == 1


@full
def test_it_says_when_all_is_ready_for_a_next_group(opened):
    page = opened(html(timeline))
    said = page.get_by_role("status")
    for batch in (2, 4):
        for call in ("step", "zero_grad", "update"):
            page.get_by_role("button", name=f"{call} after micro-batch {batch}").press("Enter")
    right = [
        f"The step after micro-batch {batch} gets 1 + 1 = 2, as it should." for batch in (2, 4)
    ]
    assert said.inner_text() == " ".join([*right, "All is ready for a next group."])
    page.get_by_role("button", name="zero_grad after micro-batch 4").press("Enter")
    assert said.inner_text().endswith("For a next group, .grad is still 2.")
    page.get_by_role("button", name="zero_grad after micro-batch 4").press("Enter")
    page.get_by_role("button", name="update after micro-batch 4").press("Enter")
    assert said.inner_text().endswith("For a next group, the scaler waits for update.")
