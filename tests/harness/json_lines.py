"""Tables of tests in JSON lines: a case in each line.

`"$name"` stands for a value that several cases share, `{"$times": [value, count]}` for a value repeated.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cases(path: Path, shared: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Read the cases of a file. `shared`: values by name."""
    return [filled(json.loads(line), shared or {}) for line in path.read_text().splitlines()]


def filled(value: Any, shared: Mapping[str, Any]) -> Any:
    """Return a value with what its names stand for."""
    match value:
        case {"$times": [part, count]}:
            return filled(part, shared) * count
        case dict():
            return {name: filled(part, shared) for name, part in value.items()}
        case list():
            return [filled(part, shared) for part in value]
        case str() if value.startswith("$"):
            return filled(shared[value[1:]], shared)
        case _:
            return value
