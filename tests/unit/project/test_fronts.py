"""Fronts of packages are small, and tests of other packages import from them alone.

The unit tests of a package import its modules: a front that lists the interior would change with every rename.
"""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from harness.mutants.nearest import ImportGraph

ROOT = Path(__file__).parents[3]
COUNTS = ROOT / "tests" / "deep_imports.toml"
MAX_EXPORTS = 40
OWN_TESTS = {
    folder: f"weft_{folder}" for folder in ("scheduler", "operator", "runner", "gateway", "predictor", "supervisor")
}
DEEP = re.compile(r"^\s*from (weft_\w+)\.\w+\.[\w.]+ import ", re.MULTILINE)


@pytest.mark.parametrize(
    "front", sorted(ROOT.glob("*/*/*/core/__init__.py")) + sorted(ROOT.glob("*/*/core/__init__.py"))
)
def test_a_core_package_exports_a_few_names(front: Path) -> None:
    names = [
        alias for node in ast.parse(front.read_text()).body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    assert len(names) <= MAX_EXPORTS


def test_no_more_files_reach_behind_a_front() -> None:
    """A module two levels deep may be rewritten at any time, and then so must every test that names it."""
    deep = Counter[str]()
    for path in (ROOT / "tests").rglob("*.py"):
        tested = {f"weft_{folder}" for folder in path.relative_to(ROOT).parts[:-1]}
        deep.update(set(DEEP.findall(path.read_text())) - tested)
    recorded = tomllib.loads(COUNTS.read_text())["files"]
    more = {package: n for package, n in deep.items() if n > recorded.get(package, 0)}
    assert not more, f"more than {COUNTS.name} has: import from the front, `weft_x.core`, which may need one more name"
    fewer = {package: deep[package] for package, n in recorded.items() if deep[package] < n}
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
