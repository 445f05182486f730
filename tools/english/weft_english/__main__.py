"""`python -m weft_english`: print the counts of each package of the checkout, or list the faults of given files."""

import argparse
import math
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

from weft_english.counts import (
    CLAUSE_AS_NOUN,
    FUNCTION_WORDS,
    MIN_WORDS,
    NO_NOUN,
    POINTING,
    Counts,
    count,
    share,
    total,
)
from weft_english.texts import Texts, read_page, read_python

ROOT = Path(__file__).parents[3]
CEILINGS = ROOT / "tests" / "unit" / "project" / "english.toml"
PRODUCT = ("weft", "services", "operator", "cli", "sim", "kernels")
_RUNNER = "services/gpu-runner/weft_runner/"
LEFT_OUT = ("weft/domain/model", "kernels", *(_RUNNER + part for part in ("model", "executors", "offload")))
"""Packages of the product that are rewritten soon. They have ceilings; the sum of the product leaves them out."""
PUBLIC = "public_docstrings"
COLUMNS: tuple[tuple[str, Callable[[Counts], object]], ...] = (
    ("docs", lambda counts: counts.docstrings),
    ("mean", lambda counts: f"{counts.docstring_mean:.3f}"),
    ("heavy", lambda counts: counts.heavy),
    ("texts", lambda counts: counts.texts),
    ("mean", lambda counts: f"{counts.text_mean:.3f}"),
    ("2nd", lambda counts: f"{counts.second_mean:.3f}"),
    ("long", lambda counts: counts.long_sentences),
    ("no noun", lambda counts: counts.no_noun),
    ("clause", lambda counts: counts.clauses),
    ("names", lambda counts: counts.function_words),
    ("generic", lambda counts: counts.generic_names),
    ("public", lambda counts: counts.public_docstrings),
    ("short", lambda counts: counts.short_docstrings),
)


def package_of(path: str) -> str:
    """Return the package of a file: two folders, three or four if a service or the operator has parts."""
    folders = path.split("/")[:-1]
    if folders[:3] == ["weft", "domain", "model"]:
        return "weft/domain/model"
    depth = {"services": 4, "operator": 3, "sim": 3}.get(folders[0] if folders else "", 2)
    return "/".join(folders[:depth]) or "pages"


@cache
def read(path: Path) -> Texts:
    """Return the texts of a Python file or a Markdown page."""
    source = path.read_text()
    return read_page(source) if path.suffix == ".md" else read_python(source)


def is_product(package: str) -> bool:
    """Whether the package is a part of the product that the targets bound."""
    return package.startswith(PRODUCT) and not package.startswith(LEFT_OUT)


def tracked(*patterns: str) -> list[Path]:
    """List the tracked files of the checkout by pattern. Generated code is left out."""
    listed = subprocess.check_output(["git", "ls-files", "-z", *patterns], cwd=ROOT, text=True).split("\0")
    return [ROOT / name for name in listed if name and "_pb2" not in name and (ROOT / name).exists()]


def counts_by_package() -> dict[str, Counts]:
    """Count the faults of the tracked files of the product, of its tools and pages. Generated code is left out."""
    packages: defaultdict[str, list[Counts]] = defaultdict(list)
    for path in tracked("*.py", "*.md"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("tests/"):
            packages["pages" if path.suffix == ".md" else package_of(name)].append(count(read(path)))
    return {package: total(counts) for package, counts in sorted(packages.items())}


def faults(name: str, texts: Texts) -> list[str]:
    """List the texts with a pointing word, a clause as a noun or "is no NOUN", and the names of a file."""
    hard = [
        f"{name}: {share(POINTING, text):.2f} {text}"
        for text in texts.docstrings + texts.details + texts.messages + texts.pages
        if len(text.split()) >= MIN_WORDS
        and (share(POINTING, text) > 0.05 or NO_NOUN.search(text) or CLAUSE_AS_NOUN.search(text))
    ]
    named = sorted({word for word in texts.names if word.strip("_") in FUNCTION_WORDS})
    return [*hard, *([f"{name}: names: {', '.join(named)}"] if named else [])]


def faults_above(counts: Counts, ceiling: dict[str, float]) -> list[str]:
    """Compare the counts of a package with its ceilings. Shares and counts may fall; public docstrings may rise."""
    measured = ceilings_of(counts)
    return [
        f"{name}: expected at {'least' if name == PUBLIC else 'most'} {ceiling[name]}, got {measured[name]}"
        for name in measured
        if (measured[name] < ceiling[name] if name == PUBLIC else measured[name] > ceiling[name])
    ]


def ceilings_of(counts: Counts) -> dict[str, float]:
    """Return the values of a package that a ceiling bounds. Shares are rounded up."""
    return {
        "docstring_mean": _rounded_up(counts.docstring_mean),
        "heavy": counts.heavy,
        "text_mean": _rounded_up(counts.text_mean),
        "long_sentences": counts.long_sentences,
        "no_noun": counts.no_noun,
        "clauses": counts.clauses,
        "function_words": counts.function_words,
        "generic_share": _rounded_up(counts.generic_names / max(1, counts.names)),
        "short_share": _rounded_up(counts.short_docstrings / max(1, counts.docstrings + counts.short_docstrings)),
        PUBLIC: counts.public_docstrings,
    }


def write_ceilings(packages: dict[str, Counts], path: Path = CEILINGS) -> None:
    """Write the ceilings. A ceiling that exists becomes only stricter."""
    old = tomllib.loads(path.read_text()) if path.exists() else {}
    lines = [
        "# Written by `make english`: counts of weft_english by package. They only fall; public docstrings only rise."
    ]
    for package, counts in packages.items():
        new = ceilings_of(counts)
        for name, ceiling in old.get(package, {}).items():
            new[name] = max(new[name], ceiling) if name == PUBLIC else min(new[name], ceiling)
        lines.append(f'"{package}" = {{ {", ".join(f"{name} = {value}" for name, value in new.items())} }}')
    path.write_text("\n".join(lines) + "\n")


def _rounded_up(share_of_words: float) -> float:
    return math.ceil(share_of_words * 1000) / 1000


def main(argv: list[str] | None = None) -> int:
    """Print the table, or the faults of the files named on the command line."""
    parser = argparse.ArgumentParser(prog="weft_english", description=__doc__)
    parser.add_argument("file", nargs="*", type=Path, help="list the hard texts and names of these files instead")
    parser.add_argument("--write", action="store_true", help=f"lower the ceilings in {CEILINGS.name} to the counts")
    arguments = parser.parse_args(argv)
    files: list[Path] = arguments.file
    for path in files:
        print(*faults(str(path), read(path)), sep="\n")
    if files:
        return 0
    packages = counts_by_package()
    if arguments.write:
        write_ceilings(packages)
    product = [counts for package, counts in packages.items() if is_product(package)]
    rows = [*packages.items(), ("product", total(product)), ("all", total(list(packages.values())))]
    print(f"{'package':44}", *(f"{name:>8}" for name, _ in COLUMNS))
    for package, counts in rows:
        print(f"{package:44}", *(f"{column(counts):>8}" for _, column in COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
