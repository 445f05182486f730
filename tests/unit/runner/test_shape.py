"""The shape of the runner's core: the writers of each attribute."""

from pathlib import Path

import weft_runner.core
from harness.shape import strangers

CORE = [Path(str(weft_runner.core.__file__)).parent]


def test_every_attribute_is_written_by_the_file_of_its_class() -> None:
    assert strangers(CORE) == []
