"""Compilers are asked what they are within a limit that a busy machine may overrun: not here."""

from collections.abc import Generator

import pytest

from harness.waiting import PATIENCE_S


@pytest.fixture(autouse=True, scope="session")
def patient() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft_kernels.cpu.compiler.ANSWER_LIMIT_S", PATIENCE_S)
        yield
