"""A plugin beside nbval's: each claim is measured in the kernel right after the cell that shows it.

So one run of a lesson checks its outputs and its claims: `pytest -p support.claimed --nbval …`.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell, NbCellError
from support.processes import LIMIT

from amp_utils.course import claims, notebook


@functools.cache
def ledger(notebooks: Path) -> list[claims.Claim]:
    return claims.read(notebooks).claims


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    outcome = yield  # a cell that fails shows nothing to measure
    if isinstance(item, IPyNbCell):
        path, tags = item.path, notebook.tags(item.cell)
        here = [c for c in ledger(path.parent) if c.lesson == path.stem and c.cell in tags]
        if wrong := contradictions(here, item.parent.kernel.kc):
            raise NbCellError(item.cell_num, "\n".join(wrong), item.cell.source)
    return outcome


def contradictions(here: list[claims.Claim], kernel) -> list[str]:
    """A sentence for each of these claims that cannot be measured or that the value contradicts."""
    if not here:
        return []
    asked = {"user_expressions": claims.expressions(here), "silent": True}
    reply = kernel.execute("", **asked, reply=True, timeout=LIMIT)
    values, wrong = claims.answers(reply)
    measured = [claim for claim in here if claim.id in values]
    found = (claim.contradiction({"here": {"value": values[claim.id]}}) for claim in measured)
    return wrong + [sentence for sentence in found if sentence]
