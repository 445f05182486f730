"""The folder below which `file:` URIs are, kept with the objects that use it.

Objects are stored with relative URIs, so a later start of the same data directory needs the folder they were written
for; it is named once, with the manifests or with `--file-root`.
"""

import os
from pathlib import Path

from weft.files import write_atomically
from weft_operator.errors import FileRootGone

FILE = "file-root"


def settle_file_root(data_dir: Path, given: Path | None) -> Path | None:
    """The folder that was named now, kept for the next start; else the one that was kept. Raises FileRootGone."""
    kept = data_dir / FILE
    if given is not None:
        write_atomically(kept, os.fsencode(given.absolute()))
        return given
    try:
        root = Path(os.fsdecode(kept.read_bytes()))
    except FileNotFoundError:
        return None
    if not root.is_dir():
        raise FileRootGone(
            f"{root}, below which `file:` URIs were ({kept} says so), is not a folder any more: "
            "name where it is now with --file-root"
        )
    return root
