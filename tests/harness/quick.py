"""Fixtures that cost a promise nothing and save most of the time of small tests, for conftest.py to import."""

import functools
import os
from collections.abc import Iterator

import httpcore2
import pytest


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Every HTTP client would load this machine's certificates: 20 ms each, for servers that speak plain HTTP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", functools.cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """For folders whose tests play no power cut: nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
