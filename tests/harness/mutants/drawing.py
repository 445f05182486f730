"""The packages whose sources are mutated, and a drawing by a seed: an edit leaves most of what it draws as it was."""

import hashlib
import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.mutants.hook import Mutant, mutants

PACKAGES: Mapping[str, str] = {  # the folder of modules that are mutated, by the name of its tests' folder
    "api": "weft/api",
    "batch": "services/batch/weft_batch/core",
    "depot": "services/depot/weft_depot/core",
    "domain": "weft/domain",
    "gateway": "services/gateway/weft_gateway/core",
    "operator": "operator/weft_operator/core",
    "predictor": "services/predictor/weft_predictor/core",
    "runner": "services/gpu-runner/weft_runner/core",
    "scheduler": "services/scheduler/weft_scheduler/core",
    "supervisor": "services/supervisor/weft_supervisor/core",
    "wire": "weft/wire",
}
GENERATED = "weft/wire/v1/"


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A mutant that changes nothing which anybody could see. The line's text is its anchor, not its number."""

    file: str
    function: str
    text: str
    operator: str
    reason: str
    index: int = 0

    def is_meant(self, mutant: Mutant) -> bool:
        """Say whether it is this one."""
        ours = self.file, self.function, self.text, self.operator, self.index
        return ours == (mutant.file, mutant.function, mutant.text, mutant.operator, mutant.index)


def package_of(file: str) -> str:
    """The package that a file belongs to. Raises ValueError: none."""
    for name, source in PACKAGES.items():
        if file.startswith(f"{source}/") and not file.startswith(GENERATED):
            return name
    raise ValueError(f"expected a module below one of {', '.join(PACKAGES.values())}, got {file}")


def all_mutants(root: Path, package: str) -> list[Mutant]:
    """Every mutant of a package, file by file."""
    found: list[Mutant] = []
    for path in sorted((root / PACKAGES[package]).rglob("*.py")):
        file = str(path.relative_to(root))
        if not file.startswith(GENERATED):
            found += mutants(file, path.read_text())
    return found


def draw(known: Mapping[str, Sequence[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Draw `count` of the mutants known by package: of each by the root of their number, operators in turn."""
    weights = {name: math.sqrt(len(there)) for name, there in known.items()}
    drawn: list[Mutant] = []
    total, taken = sum(weights.values()), 0.0
    for name, there in known.items():
        before, taken = round(count * taken / total), taken + weights[name]
        drawn += _draw_of_package(there, round(count * taken / total) - before, seed)
    return sorted(drawn, key=lambda mutant: _rank(mutant, seed))  # so that a run broken off has seen all packages


def read_equivalents(file: Path) -> list[Equivalent]:
    """Read what a TOML file lists. Raises ValueError for an entry that is not complete."""
    entries = tomllib.loads(file.read_text()).get("mutant", [])
    for entry in entries:
        if missing := {"file", "function", "text", "operator", "reason"} - {
            key for key, value in entry.items() if value or key == "function"
        }:
            raise ValueError(f"{file.name}: expected {', '.join(sorted(missing))}, got {entry}")
    return [Equivalent(**entry) for entry in entries]


def stale(equivalents: Sequence[Equivalent], root: Path) -> list[Equivalent]:
    """Entries that are no mutant of the sources as they are now."""
    known: dict[str, list[Mutant]] = {}
    for file in {entry.file for entry in equivalents}:
        known[file] = mutants(file, (root / file).read_text()) if (root / file).is_file() else []
    return [entry for entry in equivalents if not any(map(entry.is_meant, known[entry.file]))]


def _draw_of_package(there: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Operators take turns, so that constants and comparisons do not crowd out the rest."""
    by_operator: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(there, key=lambda mutant: _rank(mutant, seed), reverse=True):
        by_operator[mutant.operator].append(mutant)
    drawn: list[Mutant] = []
    while len(drawn) < min(count, len(there)):
        heads = [left for left in by_operator.values() if left]
        heads.sort(key=lambda left: _rank(left[-1], seed))
        drawn += [left.pop() for left in heads[: count - len(drawn)]]
    return drawn


def _rank(mutant: Mutant, seed: int) -> bytes:
    place = (seed, mutant.file, mutant.function, mutant.text, mutant.operator, mutant.index, mutant.line)
    return hashlib.sha256(repr(place).encode()).digest()
