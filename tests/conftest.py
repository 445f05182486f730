"""Shared by all suites: one seed, printed, from `WEFT_TEST_SEED` (default 0)."""

import os
import random

import pytest

SEED = int(os.environ.get("WEFT_TEST_SEED", "0"))


def pytest_report_header() -> str:
    return f"weft seed: {SEED} (set WEFT_TEST_SEED to replay)"


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)
