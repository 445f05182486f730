"""The shape of the runner's core: who writes what, and how large a class is."""

from pathlib import Path

import weft_runner.core
from harness.shape import oversized, strangers

CORE = [Path(str(weft_runner.core.__file__)).parent]
ALLOWED = {
    "Adapter": 23,  # a record
    "PageTable": 25,  # one book: what is free, held by sequences and lent to adapters are all pages
    "RequestPool": 20,  # the machine of the runner, with an attribute for each of its parts
    "Sequence": 27,  # a method for each of the transitions that its module draws
}


def test_every_attribute_is_written_by_the_file_of_its_class() -> None:
    assert strangers(CORE) == []


def test_no_class_has_more_public_members_than_one_holds_in_the_head() -> None:
    assert oversized(CORE, ALLOWED) == {}
