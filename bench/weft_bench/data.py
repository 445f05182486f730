"""Data sets of benchmarks: read from `--data DIR`, printed as skipped where they are absent.

Sets under Apache, MIT or CC BY licences may live in `bench/data/`; others are never part of the repository.
"""

import csv
import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weft_stage.errors import BadData

Value = TypeVar("Value")


def find(name: str, directory: Path | None) -> Path | None:
    """The file `name` in the directory, or None."""
    path = directory / name if directory else None
    return path if path is not None and path.is_file() else None


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a `.jsonl` or `.csv` file, gzipped or not, as dictionaries (csv values are text)."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as text:
        if ".csv" in path.suffixes:
            yield from csv.DictReader(text)
        else:
            yield from (json.loads(line) for line in text if line.strip())


def table(path: Path, columns: Collection[str]) -> list[dict[str, Any]]:
    """Rows of a file that has these columns. Raises BadData."""
    found = list(rows(path))
    if lacking := [name for name in columns if not found or name not in found[0]]:
        raise BadData(f"{path} lacks {', '.join(lacking)}")
    return found


def known(of: Mapping[str, Value], name: str, what: str) -> Value:
    """The entry of this name. Raises BadData with those that there are."""
    if name not in of:
        raise BadData(f"{what} {name!r} is unknown; there are: {', '.join(of)}")
    return of[name]
