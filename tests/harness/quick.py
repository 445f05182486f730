"""Fixtures that cost a promise nothing and save most of the time of small tests, for conftest.py to import."""

import functools
import os
import ssl
from collections.abc import Iterator

import httpcore2
import pytest


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Every HTTP client would load this machine's certificates: 20 ms each, for servers that speak plain HTTP.

    A test that names others in `SSL_CERT_FILE` has those.
    """
    load = httpcore2.default_ssl_context

    @functools.cache
    def loaded(_named: str | None, trust_env: bool) -> ssl.SSLContext:
        return load(_trust_env=trust_env)

    def default_ssl_context(*, _trust_env: bool = True) -> ssl.SSLContext:
        return loaded(os.environ.get("SSL_CERT_FILE"), _trust_env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", default_ssl_context)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_disk() -> Iterator[None]:
    """For folders whose tests play no power cut: nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
