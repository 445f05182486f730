"""What the documents promise is there: files, reasons, flags, and the tests that show a feature.

`python -m harness.documents` (a part of `make check`) prints what is not, and exits with 1 if there is anything. Links
are checked as the site is built (`site_hooks.py`).
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

from harness.site_hooks import DOCUMENTS
from weft.api.reasons import ADVICE
from weft_bench.cases import BENCHMARKS
from weft_bench.main import app as bench
from weft_bench.options import option_flag
from weft_cli.main import app as weft

ROOT = Path(__file__).parents[2]
REASONS = ROOT / "docs" / "reference" / "reasons.md"
PAGES = sorted(page for pattern in DOCUMENTS for page in ROOT.glob(pattern))
PROCESSES = (
    "weft_gateway", "weft_scheduler", "weft_predictor", "weft_supervisor", "weft_batch", "weft_depot", "weft_runner",
    "weft_operator.kubernetes", "weft_predictor_train", "weft_sim speed",
)  # fmt: skip
OF_OTHERS = {  # flags of kubectl, helm and podman
    "all", "cascade", "create-namespace", "dry-run", "field-manager", "for", "force", "force-conflicts", "from-literal",
    "ignore-not-found", "overwrite", "raw", "replicas", "server-side", "set", "take-ownership", "timeout", "type",
    "values", "wait",
}  # fmt: skip
TESTED = ("docs/features.md", "docs/threat-model.md")  # what they say is shown by tests
SHORT_CELLS = ("docs/features.md", "docs/reference/")
MAX_CELL_CHARACTERS = 200  # characters of its Markdown; more goes into a section that the cell links
NOT_OURS = ("docs/benchmarks", "docs/plans", "examples")  # flags as they were then; of train.py


def faults() -> Iterator[str]:
    """Yield each fault as `PAGE: what is wrong`."""
    for name in TESTED:
        commands = _missing_tests((ROOT / name).read_text())
        yield from (f"{name}: `pytest {command}` selects no test" for command in commands)
    features = (ROOT / "docs" / "features.md").read_text()
    yield from (f"docs/features.md: {name} is not there" for name in _missing_files(features))
    yield from _reasons(REASONS.read_text())
    flags = known_flags() | OF_OTHERS
    for page in PAGES:
        if _name(page).startswith(SHORT_CELLS):
            yield from (f"{_name(page)}:{fault}" for fault in _long_cells(page.read_text()))
        if not _name(page).startswith(NOT_OURS):
            yield from (f"{_name(page)}: no command has the flag --{flag}" for flag in sorted(_flags(page) - flags))


def known_flags() -> set[str]:
    """Return the flags of all processes and of the `weft` command with its subcommands."""
    with ThreadPoolExecutor(os.cpu_count()) as several:
        helps = several.map(_help, PROCESSES)
    return {
        *re.findall(r"--([a-z][a-z0-9-]+)", "".join(helps)),
        *_options(typer.main.get_command(weft)),
        *_options(typer.main.get_command(bench)),
        *(option_flag(each.name)[2:] for row in BENCHMARKS.values() for each in fields(row.options)),
    }


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _missing_tests(features: str) -> Iterator[str]:
    for command in sorted(set(re.findall(r"`pytest (tests/[^`]+)`", features))):
        paths, _, selection = command.partition(" -k ")
        if not all(any(selection in name for name in _tests(ROOT / path)) for path in paths.split()):
            yield command


def _tests(path: Path) -> list[str]:
    files = [path] if path.suffix == ".py" else sorted(path.rglob("test_*.py"))
    return [name for file in files if file.exists() for name in re.findall(r"def (test_\w+)", file.read_text())]


def _missing_files(features: str) -> list[str]:
    names = set(re.findall(r"`((?:weft_\w+|core|model|memory|services|weft|kernels)/[\w/.]*)`", features))
    roots = [ROOT, *ROOT.glob("services/*"), *ROOT.glob("services/*/weft_*")]
    roots += [ROOT / name for name in ("sim", "train", "operator", "kernels")]
    return sorted(name for name in names if not any((root / name).exists() for root in roots))


def _long_cells(page: str) -> Iterator[str]:
    """Yield `LINE: what is wrong` for each cell of a table that is too long."""
    for number, line in enumerate(page.splitlines(), 1):
        for cell in re.split(r"(?<!\\)\|", line) if line.lstrip().startswith("|") else ():
            if (length := len(cell.strip())) > MAX_CELL_CHARACTERS:
                yield f"{number}: expected at most {MAX_CELL_CHARACTERS} characters in a cell, got {length}"


def _reasons(page: str) -> Iterator[str]:
    """Check that the reference has every reason of a condition, and no other."""
    chapter = page.partition("**Events**")[0]
    rows = re.findall(r"(?m)^\| (`[^|]*) \|", chapter)
    (true,) = re.findall(r"\*\*Of True conditions\*\*: (.*)", chapter)
    listed = {name for row in [*rows, true] for name in re.findall(r"`(\w+)`", row)}
    yield from (f"{_name(REASONS)}: the reason {name} is missing" for name in sorted(set(ADVICE) - listed))
    yield from (f"{_name(REASONS)}: there is no reason {name}" for name in sorted(listed - set(ADVICE)))


def _flags(page: Path) -> set[str]:
    """Return the flags in what is to be typed: code spans and blocks."""
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))
    return set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", code))


def _help(command: str) -> str:
    line = [sys.executable, "-m", *command.split(), "--help"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def _options(command: Any) -> Iterator[str]:
    """Yield the options of a command and those below it; Typer has no public name for their types."""
    for parameter in command.params:
        yield from (name.removeprefix("--") for name in (*parameter.opts, *parameter.secondary_opts))
    for below in getattr(command, "commands", {}).values():
        yield from _options(below)


def main() -> int:
    found = list(faults())
    print("\n".join(found) if found else f"{len(PAGES)} pages: files, reasons, flags and tests are there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
