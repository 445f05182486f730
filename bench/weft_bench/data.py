"""Data sets of benchmarks: read from `--data DIR`, printed as skipped where they are absent.

No set is part of the repository; docs/benchmarks/README.md lists sources and columns.
"""

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def find(name: str, directory: Path | None) -> Path | None:
    """Return the file `name` in the directory, or None."""
    path = directory / name if directory else None
    return path if path is not None and path.is_file() else None


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows of a `.jsonl` or `.csv` file, gzipped or not, as dictionaries (csv values are text)."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as text:
        if ".csv" in path.suffixes:
            yield from csv.DictReader(text)
        else:
            yield from (json.loads(line) for line in text if line.strip())
