"""Every test repeats itself: the same random numbers and the same examples in every run."""

import random
import sys

import pytest
from hypothesis import settings
from support.browser import browser, opened, visit  # noqa: F401  (one browser for all tests)

settings.load_profile("ci")  # derandomized, and without a deadline: the machine may be busy


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Seed what a test draws from; torch only where a test has imported it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
