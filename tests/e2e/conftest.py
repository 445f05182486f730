"""Whole stacks as processes, as a user starts them. Nothing is faked here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from harness.quickstart import tokenizer as quickstart_tokenizer
from weft_bench.stack import Stack, quickstart


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The quickstart, ready, for a whole module."""
    with Stack(quickstart(), short_folder(tmp_path_factory)) as made:
        made.wait_for_models()
        yield made


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return quickstart_tokenizer()


def short_folder(factory: pytest.TempPathFactory) -> Path:
    """A data directory whose socket path stays below the 108 bytes that a unix socket may have."""
    return factory.mktemp("w")
