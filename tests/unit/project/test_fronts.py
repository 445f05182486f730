"""Tests take what they need from the fronts of packages; files that reach behind them are counted, and become fewer."""

import re
import tomllib
from collections import Counter
from pathlib import Path

from harness.mutants.nearest import ImportGraph

ROOT = Path(__file__).parents[3]
COUNTS = ROOT / "tests" / "deep_imports.toml"
DEEP = re.compile(r"^\s*from (weft_\w+)\.\w+\.[\w.]+ import ", re.MULTILINE)


def test_no_more_files_reach_behind_a_front() -> None:
    """A module two levels deep may be rewritten at any time, and then so must every test that names it."""
    found = Counter[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        found.update(set(DEEP.findall(path.read_text())))
    recorded = tomllib.loads(COUNTS.read_text())["files"]
    more = {package: n for package, n in found.items() if n > recorded.get(package, 0)}
    assert not more, f"more than {COUNTS.name} has: import from the front, `weft_x.core`, which may need one more name"
    fewer = {package: found[package] for package, n in recorded.items() if found[package] < n}
    assert not fewer, f"fewer than {COUNTS.name} has: write these there"


def test_a_name_taken_from_a_front_leads_to_its_module_alone(tmp_path: Path) -> None:
    """Else every test of a front would be near to every module behind it."""
    core = tmp_path / "weft_a" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("from weft_a.core.one import One\nfrom weft_a.core.two import (\n    Two,\n)\n")
    (core / "one.py").write_text("class One: ...\n")
    (core / "two.py").write_text("class Two: ...\n")
    tests = tmp_path / "tests" / "unit"
    tests.mkdir(parents=True)
    (tests / "test_one.py").write_text("from weft_a.core import One\n")
    (tests / "test_both.py").write_text("from weft_a.core import One, Two\n")
    (tests / "test_whole.py").write_text("from weft_a import core\n")
    graph = ImportGraph(tmp_path, ("weft_a", "tests/unit"))
    near = {name: set(graph.distances(f"weft_a/core/{name}.py")) for name in ("one", "two")}
    both, whole = "tests/unit/test_both.py", "tests/unit/test_whole.py"
    assert near["one"] - near["two"] == {"weft_a/core/one.py", "tests/unit/test_one.py"}
    assert {both, whole} <= near["two"]
    assert graph.distances("weft_a/core/two.py")[both] == 1
    assert graph.distances("weft_a/core/two.py")[whole] == 2
