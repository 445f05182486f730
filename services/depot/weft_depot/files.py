"""Files by name, as a source's snapshot, a copy or the blobs of an artifact give them."""

from collections.abc import Callable, Mapping
from typing import BinaryIO, Protocol

FileFilter = Callable[[str], bool]
"""Return whether a source shall bring the file of that name."""


class Files(Protocol):
    """Named, readable files: a source's snapshot, a copy, or blobs."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of each file, by its plain name."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file. The caller closes it. `open` and reads raise Refused, Unavailable."""
        ...
