"""Mutants: each operator changes what it says and nothing else, children are mutated too, and no survivor is hidden."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.costs import lines_of
from harness.mutants.__main__ import EQUIVALENT, killed_before, sort_out
from harness.mutants.callers import read_callers
from harness.mutants.calls import NOTED, noting
from harness.mutants.drawing import Equivalent, draw, package_of, read_equivalents, stale
from harness.mutants.hook import ROOT, VARIABLE, Mutant, UnknownMutant, mutants, mutated
from harness.mutants.nearest import make_nearness, order_callers
from harness.mutants.session import can_be_planted
from harness.mutants.trials import SITE, Ledger, Line, digest

FILE = "weft/domain/lru.py"  # any file of the sources
TRY = """
import json, sys
from pathlib import Path
from harness.guard import guarded
from harness.mutants import trials
from harness.mutants.__main__ import run_in_session
from harness.mutants.edits import Edit
from harness.mutants.hook import mutants

def work(folder):
    trials.MIN_CPU_BOUND_S = 2.0
    planted, tests, of_edits, edits = *sys.argv[2:5], [Edit(*one) for one in json.loads(sys.argv[5])]
    gone, there = (f"{Path(tests).name}::test_gone",), (Path(tests).name,)
    found = mutants(planted, Path(planted).read_text())
    def job(one, in_session=False, **stages):
        return trials.Job(one, "planted", trials.digest(one.file), stages, in_session)
    in_session = [job(one, True, slow=gone, callers=there) for one in found]
    own = [*(job(one, nearest=(tests,)) for one in found), *(job(one, nearest=(of_edits,)) for one in edits)]
    lines = []
    run_in_session(
        in_session, 1, folder, lambda made: lines.append(sorted(trials.run_jobs(in_session, 2, 1, folder, {}, made)))
    )
    lines.append(sorted(trials.run_jobs(own, 2, 1, folder, {})))
    for how in lines:
        print("LINES", json.dumps([[line.text, line.outcome, line.by.rpartition("::")[2]] for _, line in how]))
    return 0

sys.path[0] = sys.argv[1]
sys.exit(guarded("weft-planted-", work))
"""
PLANTED = """
def smallest(a, b):
    return min(a, b)

def count(n):
    while n:
        n -= 1
    return n
"""
TESTS = """
import subprocess, sys
from pathlib import Path

def test_is_red_anyway():
    assert False
def test_smallest():
    assert subprocess.run([sys.executable, "-c", "import planted; print(planted.smallest(1, 2))"],
        cwd=Path(__file__).parent, capture_output=True).stdout == b"1\\n"
def test_count():
    import planted
    assert planted.count(4) == 0
"""
RECORD = """
import sys
from pathlib import Path
from harness.guard import guarded
from harness.mutants.callers import record_callers
from harness.mutants.trials import SITE
from harness.suite import Run, Suite

def work(folder):
    run = Run(1, folder, folder / "logs", lambda _: None, print)
    record_callers(Path(sys.argv[2]), [Suite("calling", (sys.argv[3],))], run, SITE)
    return 0

sys.path[0] = sys.argv[1]
sys.exit(guarded("weft-calling-", work))
"""
CALLING = """
import subprocess, sys
import pytest
from weft.domain.lru import LruDict

@pytest.fixture(scope="module")
def kept():
    return LruDict(1)
def test_set(kept):
    kept["a"] = 1
def test_child():
    subprocess.run([sys.executable, "-c", "from weft.domain.lru import LruDict; LruDict(1).touch('a', str)"])
"""
PAGE = "services/gateway/weft_gateway/page/index.html"
EDITS = [(PAGE, "<title>", "<title>x"), (PAGE, "<body", "<body id='x'")]
TESTS_OF_EDITS = """
from importlib.resources import files

import harness

PAGE = files("weft_gateway").joinpath("page/index.html").read_text()

def test_is_red_in_the_copy():
    assert harness.__path__[0].startswith("{tests}")
def test_title():
    assert "<title>x" not in PAGE
"""
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # hypothesis takes a pytest a second
CONFTEST = """
from harness import progress

def pytest_addoption(parser):
    parser.addoption("--hypothesis-profile")
    parser.addoption("--hypothesis-seed")

def pytest_configure(config):
    progress.register(config)
"""


@pytest.mark.parametrize(
    ("source", "operator", "becomes"),
    [
        ("a < b", "comparison", "a <= b"),
        ("a >= b", "comparison", "a > b"),
        ("a == b", "comparison", "a != b"),
        ("a not in b", "comparison", "a in b"),
        ("a is None", "comparison", "a is not None"),
        ("0 < a <= b", "comparison:1", "0 < a < b"),
        ("a and b", "boolean", "a or b"),
        ("min(a, b)", "extreme", "max(a, b)"),
        ("a - b", "sign", "a + b"),
        ("a += b", "sign", "a -= b"),
        ("f(0.5)", "constant", "f(1.5)"),
        ("a[0]", "constant", "a[1]"),
        ("b = not a", "not", "b = not (not a)"),
        ("a.pop(b)", "call", "None"),
        ("async def f(): await g()", "call", "async def f(): None"),
        ("def f(): return True", "return", "def f(): return False"),
    ],
)
def test_an_operator_changes_what_it_says(source: str, operator: str, becomes: str) -> None:
    assert ast.unparse(mutated(f"planted.py:1:{operator}", source)) == ast.unparse(ast.parse(becomes))


@pytest.mark.parametrize(
    "source",
    [
        'log.warning("%d", len(a) + 1)',
        "self._logger.info(a, b == c)",
        'raise ValueError(f"expected {a + 1}")',
        "assert a < b",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "@cache(1)\ndef f(): ...",
        '"a" + b',
        'f"{a + 1}"',
        "MAX_BYTES = 16384",
        "REVIEW_S = 0.25",
        "__all__ = [1 < 2]",
        "if TYPE_CHECKING:\n    a = 1",
        "class A:\n    def __init__(self): super().__init__()",
    ],
)
def test_what_nobody_promises_is_left_alone(source: str) -> None:
    assert mutants("planted.py", source) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{FILE}:1", "expected FILE:LINE:OPERATOR"),
        (f"{FILE}:one:comparison", "expected FILE:LINE:OPERATOR"),
        ("weft/nowhere.py:1:comparison", "whose file is not there"),
    ],
)
def test_a_process_with_a_name_that_is_no_mutant_ends_at_once(name: str, expected: str) -> None:
    done = python({VARIABLE: name}, "print('went on')")
    assert (done.returncode, done.stdout) == (1, "")
    assert expected in done.stderr


def test_a_stale_mutant_is_refused_and_those_of_the_line_are_named(tmp_path: Path) -> None:
    planted = plant(tmp_path)
    with pytest.raises(UnknownMutant, match=r"line 3 has: .*planted\.py:3:extreme"):
        mutated(f"{planted}:3:comparison", PLANTED)
    done = python({VARIABLE: f"{planted}:3:comparison"}, "import planted", tmp_path)
    assert done.returncode == 1
    assert "UnknownMutant" in done.stderr


def test_a_grandchild_is_mutated_and_no_bytecode_is_read_or_written(tmp_path: Path) -> None:
    planted = plant(tmp_path)
    ask = "import planted; print(planted.smallest(1, 2))"
    below = (
        f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {ask!r}], text=True), end='')"
    )
    assert python({}, ask, tmp_path).stdout == "1\n"
    (compiled,) = (tmp_path / "__pycache__").glob("planted*")
    before = compiled.read_bytes()
    assert python({VARIABLE: f"{planted}:3:extreme"}, below, tmp_path).stdout == "2\n"
    assert compiled.read_bytes() == before
    assert python({}, ask, tmp_path).stdout == "1\n"


@pytest.mark.slow
def test_trials_tell_what_is_killed_by_which_test_and_what_lives(tmp_path: Path) -> None:
    """In forks of one session, and in a pytest each with edits in a copy: the checkout stays as it is."""
    plant(tmp_path)
    tests, page = str(ROOT / "tests"), (ROOT / PAGE).read_bytes()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_planted.py").write_text(f"{TESTS}\nimport planted\n")
    (tmp_path / "test_edited.py").write_text(TESTS_OF_EDITS.format(tests=tests))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((tests, str(tmp_path))), **BARE}
    files = [str(tmp_path / f"{name}.py") for name in ("planted", "test_planted", "test_edited")]
    command = [sys.executable, "-c", TRY, tests, *files, json.dumps(EDITS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("LINES ")]
    planted = [
        ["return min(a, b)", "killed", "test_smallest"],  # in a child of the test
        ["n -= 1", "killed", "test_count"],  # it never ends
        ["n -= 1", "alive", ""],
    ]
    assert said == [planted, [*planted, ["<title>", "killed", "test_title"], ["<body", "alive", ""]]]
    assert (ROOT / PAGE).read_bytes() == page


@pytest.mark.parametrize(
    ("line", "planted"),
    [
        ("def f(): return a < 1", True),
        ("class A:\n  def f(self): return [lambda: b < 1]", True),
        ("LIMIT = 1 < 2", False),
        ("class A:\n  limit: int = 1", False),
        ("def f(limit=1): ...", False),
        ("def f(): a = 1; return lambda: g(a)", True),
        ("def f(a):\n  def g(): use(a)\n  return g", False),  # its function would have no cell for `a`
    ],
)
def test_what_runs_at_import_is_not_planted_in_functions_that_live(tmp_path: Path, line: str, planted: bool) -> None:
    file = tmp_path / "planted.py"
    file.write_text(line)
    (mutant, *_) = mutants(str(file), line)
    assert can_be_planted(mutant) == planted


def test_a_mutant_meets_the_tests_that_call_its_function_in_whatever_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_calling.py").write_text(CALLING)
    tests, recorded = str(ROOT / "tests"), tmp_path / "callers.json"
    command = [sys.executable, "-c", RECORD, tests, str(recorded), str(tmp_path / "test_calling.py")]
    environment = {**os.environ, "PYTHONPATH": tests, **BARE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    callers = read_callers(recorded)

    def find(function: str) -> set[str]:
        found = callers.find(Mutant(FILE, 1, "call", 0, function, ""))
        return {test.rpartition("/")[2].partition("test_calling.py")[2] for test in found}

    assert find("LruDict.__setitem__") == {"::test_set", "::test_child"}
    assert find("LruDict.touch") == {"::test_child"}
    assert find("LruDict.__init__") == {"", "::test_child"}, "a fixture of the whole file"
    assert find("LruDict") == {"", "::test_set", "::test_child"}, "lines of the class itself"
    assert find("ExpiringDict") == set()


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    'docstring'\n    x = 1\n    return x",
        "def f():\n    'docstring'",
        "def f(): return 1",
        "def f(\n    x=1,\n):\n    return (\n        x,\n        x)",
        "def f():\n    while True:\n        break",
        "def f():\n    def g():\n        for i in range(3): yield i\n    return list(g())",
        "import functools\n@functools.cache\ndef f():\n    return [\n        i for i in range(3)]",
        "class A:\n    @property\n    def g(self):\n        return lambda: self\ndef f():\n    return A().g()",
        "async def g():\n    return 1\ndef f():\n    try: g().send(None)\n    except StopIteration: pass",
    ],
)
def test_a_function_that_notes_its_call_runs_as_many_lines(source: str) -> None:
    """Tests count lines, also while the callers are recorded."""
    called, lines = set[str](), []
    for tree in (ast.parse(source), noting(FILE, source)):
        module: dict[str, Any] = {NOTED: called}
        exec(compile(tree, FILE, "exec"), module)
        lines.append(lines_of(module["f"]))
    assert lines[0] == lines[1]
    assert f"{FILE}:f" in called


def test_cheap_tests_of_near_files_come_first_and_a_whole_file_has_its_tests() -> None:
    near, far = "tests/unit/a/test_core.py", "tests/unit/b/test_b.py"
    nearness = make_nearness("weft_a/core.py", {near: 1, far: 2}, "tests/unit/a", {})
    records = {f"{near}::slow": 2.0, f"{near}::costly": 20.0}
    tests = [f"{far}::x", far, f"{near}::costly", f"{near}::slow", f"{near}::quick"]
    assert order_callers(tests, nearness, records) == ([f"{near}::quick", f"{near}::slow", far], [f"{near}::costly"])


def test_a_drawing_depends_on_the_seed_and_has_mutants_of_all_packages_and_operators() -> None:
    source = "\n".join(f"a{i} = b < c and not d + {i}" for i in range(40))
    known = {name: mutants(f"{name}.py", source[:size]) for name, size in (("big", None), ("small", 100))}
    drawn = draw(known, 20, seed=1)
    assert drawn == draw(known, 20, seed=1) != draw(known, 20, seed=2)
    assert len(set(drawn)) == 20
    assert {mutant.file for mutant in drawn} == {"big.py", "small.py"}
    assert {mutant.operator for mutant in drawn} == {"comparison", "boolean", "not", "sign", "constant"}
    assert len(draw(known, 10**6, seed=1)) == sum(map(len, known.values()))


def test_a_run_that_was_broken_off_goes_on_and_what_lived_is_tried_with_other_tests(tmp_path: Path) -> None:
    killed, alive, new, listed = mutants(FILE, (ROOT / FILE).read_text())[:4]
    ledger = Ledger(tmp_path / "ledger")
    ledger.add(line_of(killed, "killed"))
    ledger.add(line_of(alive, "alive"))
    ledger = Ledger(tmp_path / "ledger")
    equivalents = [Equivalent(FILE, listed.function, listed.text, listed.operator, "why", listed.index)]
    chosen = [killed, alive, new, listed]
    left, equivalent, known = sort_out(chosen, ledger, equivalents, "abc", False)
    assert (left, equivalent) == ([new], [listed])
    assert [line.outcome for line in known] == ["killed", "alive"]
    assert sort_out(chosen, ledger, equivalents, "def", False)[0] == [alive, new]
    assert sort_out(chosen, ledger, equivalents, "abc+", False)[0] == [alive, new], "tests that are not committed"
    ledger.add(replace(line_of(killed, "killed"), source="another text"))
    assert sort_out(chosen, ledger, equivalents, "abc", False)[0] == [new]


def test_killed_mutants_of_what_has_changed_are_found_again_in_lines_that_moved(tmp_path: Path) -> None:
    moved, gone, lives = mutants(FILE, (ROOT / FILE).read_text())[:3]
    ledger = Ledger(tmp_path / "ledger")
    ledger.add(line_of(replace(moved, line=moved.line + 100), "killed"))
    ledger.add(line_of(replace(gone, text="a line that is not there"), "killed"))
    ledger.add(line_of(lives, "alive"))
    assert killed_before(ledger, ["domain"], {FILE}) == ({moved: "tests/unit/domain/test_lru.py"}, 1)
    assert killed_before(ledger, ["domain"], {"tests/unit/domain/test_lru.py"})[0] == {
        moved: "tests/unit/domain/test_lru.py"
    }
    assert killed_before(ledger, ["domain"], {"operator/weft_operator/core/scaling.py"}) == ({}, 0)
    assert killed_before(ledger, ["operator"], {FILE}) == ({}, 0)


def test_listed_equivalents_are_mutants_of_the_sources_and_have_a_reason() -> None:
    listed = read_equivalents(EQUIVALENT)
    assert stale(listed, ROOT) == []
    assert all(package_of(entry.file) for entry in listed)


def plant(folder: Path) -> Path:
    planted = folder / "planted.py"
    planted.write_text(PLANTED)
    return planted


def python(environment: dict[str, str], code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the hook's folder on its path, before others."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SITE, *path))), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**variables, **environment}, capture_output=True, text=True, check=False)


def line_of(mutant: Mutant, outcome: str) -> Line:
    by = "tests/unit/domain/test_lru.py::test" if outcome == "killed" else ""
    return Line(mutant.name, "domain", mutant.function, mutant.text, digest(FILE), outcome, by, commit="abc")
