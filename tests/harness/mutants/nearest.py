"""Choose the test files that may see a module: the nearest in the graph of imports first, cheap ones before others."""

import re
import tomllib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.order import usual_cpu_s

SUITES = ("tests/unit", "tests/sim", "tests/integration")
TESTS = ("tests/harness", *SUITES, "tests/kernels", "tests/oracle", "tests/e2e")
COSTLY_TEST_CPU_S = 3.0
COSTLY_CPU_S = 10.0  # a file that takes more runs last, and only where it imports the module itself
N_NEAREST = 8
# Not parsed: that takes ten seconds for all files, and a word too many in a comment is no harm.
IMPORT = re.compile(r"^[ \t]*(?:import +(.+)|from +([\w.]+) +import +(\([^)]*\)|.+))$", re.MULTILINE)


class Choice(NamedTuple):
    """Test files in the order in which they run."""

    nearest: tuple[str, ...]
    package: tuple[str, ...]
    costly: tuple[str, ...]


class ImportGraph:
    """The imports between the files of a checkout, found without running any."""

    def __init__(self, root: Path, packages: Sequence[str]) -> None:
        """`packages`: folders of packages and of tests, relative to `root`."""
        files: dict[str, str] = {}
        for package in packages:
            for path in (root / package).rglob("*.py"):
                parts = path.relative_to((root / package).parent).with_suffix("").parts
                files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = str(path.relative_to(root))
        paths = set(files.values())
        files |= {path.removesuffix(".py").replace("/", "."): path for path in paths}  # `tests.unit.operator.planning`
        imports = {path: [*_imported((root / path).read_text())] for path in paths}
        fronts = {
            module: {name: of for of, names in imports[path] for name in names}
            for module, path in files.items()
            if path.endswith("/__init__.py")
        }
        self._importers: dict[str, set[str]] = defaultdict(set)
        for path in paths:
            for module in _modules(imports[path], fronts):
                if there := files.get(module):
                    self._importers[there].add(path)
            for folder in Path(path).parents if Path(path).name.startswith("test_") else ():
                self._importers[str(folder / "conftest.py")].add(path)  # its fixtures

    def distances(self, file: str) -> dict[str, int]:
        """Count the imports that lie between a file and each of those that import it, at the least."""
        found, queue = {file: 0}, deque([file])
        while queue:
            here = queue.popleft()
            for importer in self._importers[here] - found.keys():
                found[importer] = found[here] + 1
                queue.append(importer)
        return found


def import_graph(root: Path) -> ImportGraph:
    """The graph of a checkout: its packages, the harness and the tests."""
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    return ImportGraph(root, (*wheel["packages"], *TESTS))


Nearness = Callable[[str], tuple[bool, int, bool, float, str]]


def make_nearness(file: str, distances: Mapping[str, int], suite: str, cpu_s: Mapping[str, float]) -> Nearness:
    """Make the order of test files in which a mutant of `file` dies soonest: a key for `sorted`."""
    stem = Path(file).stem

    def nearness(test: str) -> tuple[bool, int, bool, float, str]:
        same_name = Path(test).stem in (f"test_{stem}", f"test_{Path(file).parent.name}_{stem}")
        distance = distances.get(test, len(distances))  # it calls the module in another process
        return not same_name, distance, not test.startswith(f"{suite}/"), cpu_s.get(test, 1.0), test

    return nearness


def order_callers(
    tests: Iterable[str], nearness: Nearness, records: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Order tests, ids or whole files: the nearest file first, in it what is cheap. Returns cheap ones and costly ones.

    `records`: CPU seconds by test.
    """
    given = set(tests)
    chosen = [test for test in given if "::" not in test or test.partition("::")[0] not in given]
    ordered = sorted(chosen, key=lambda test: (nearness(test.partition("::")[0]), records.get(test, 0.0), test))
    cheap, costly = list[str](), list[str]()
    for test in ordered:
        (costly if records.get(test, 0.0) > COSTLY_TEST_CPU_S else cheap).append(test)
    return cheap, costly


def choose(file: str, distances: Mapping[str, int], suite: str, cpu_s: Mapping[str, float]) -> Choice:
    """Test files for a mutant of `file`: those of the package's folder `suite`, and what imports the module elsewhere.

    `distances`: of the file, from the graph; `cpu_s`: by test file, where known.
    """
    nearness = make_nearness(file, distances, suite, cpu_s)
    tests = [name for name in distances if Path(name).name.startswith("test_") and name.startswith(SUITES)]
    ranked = sorted((name for name in tests if name.startswith(f"{suite}/") or distances[name] == 1), key=nearness)
    ranked += sorted(set(tests) - set(ranked), key=nearness)[: max(0, N_NEAREST - len(ranked))]
    usual = usual_cpu_s()
    costly = {name for name in ranked if cpu_s.get(name, usual.get(name, 0.0)) > COSTLY_CPU_S}
    quick = [name for name in ranked if name not in costly]
    direct = (name for name in ranked if name in costly and distances[name] == 1)
    own = (name for name in quick[N_NEAREST:] if name.startswith(f"{suite}/"))
    return Choice(tuple(quick[:N_NEAREST]), tuple(own), tuple(direct))


def cost_of_files(records: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds by test file, of those by test."""
    costs: dict[str, float] = defaultdict(float)
    for test, cpu_s in records.items():
        costs[test.partition("::")[0]] += cpu_s
    return dict(costs)


def _imported(source: str) -> Iterable[tuple[str, Sequence[str]]]:
    """The modules that a file names in imports, wherever they stand, each with the names that it takes of it."""
    for plain, module, names in IMPORT.findall(source):
        yield from ((name, ()) for name in re.findall(r"[\w.]+", plain))
        if module:
            yield module, re.findall(r"\w+", names)


def _modules(
    imports: Iterable[tuple[str, Sequence[str]]], fronts: Mapping[str, Mapping[str, str]]
) -> Iterable[str]:  # fmt: skip
    """Both `a` and `a.b` for `from a import b`; where package `a` has b from one of its modules, that module alone.

    A test that takes one name from a package's front is near to the module of that name, not to the whole package.
    """
    for module, names in imports:
        front = fronts.get(module, {})
        yield from {front[name] for name in names if name in front}
        if not names or not front.keys() >= {*names}:
            yield module
        yield from (f"{module}.{name}" for name in names if name not in front)
