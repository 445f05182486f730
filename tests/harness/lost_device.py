"""A plugin of pytest for tests on a GPU: after a test that made the device unusable its process ends.

A bad address or a failed assertion of a kernel stays an error for every later call of the process. pytest-xdist counts
the process as crashed in that test, whose report it has already, and runs the next test in another one.
"""

import os
import sys
from collections.abc import Generator

import pytest

EXIT_CODE = 70


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    done = yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(EXIT_CODE)
            pytest.exit(f"{item.nodeid} left the device unusable: {error}", EXIT_CODE)
    return done
