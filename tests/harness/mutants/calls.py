"""Functions of the core packages that note when they are called, in every process that `site/sitecustomize.py` enters.

`WEFT_CALLS` names the folder into which a child process of a test writes at its end what it has called.
"""

import ast
import atexit
import builtins
import dis
import importlib.machinery
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[3]
VARIABLE = "WEFT_CALLS"  # the folder into which each process writes what it has called
NOTED = "__weft_called__"
PACKAGES_VARIABLE = "WEFT_CALLS_OF"  # folders, relative to the checkout, with a colon between two
RUNNING_VARIABLE = "PYTEST_CURRENT_TEST"  # pytest's: `FILE::TEST (call)`, which children inherit

called = set[str]()  # `FILE:FUNCTION`; of a test's own process, since the test began


class NotingLoader(importlib.machinery.SourceFileLoader):
    """Compiles a module whose functions note that they are called; no bytecode cache is read or written."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = noting(str(Path(path).resolve().relative_to(ROOT)), self.get_data(path).decode())
        return compile(tree, path, "exec", dont_inherit=True)


class NotingFinder:
    """Finds modules of the core packages; all others are the business of those after it."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [ROOT / folder for folder in folders]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of a core package; None for every other one."""
        if not fullname.startswith("weft"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader) or not spec.origin:
            return None
        if not any(Path(spec.origin).resolve().is_relative_to(folder) for folder in self._folders):
            return None
        spec.loader, spec.cached = NotingLoader(fullname, spec.origin), None
        return spec


def noting(file: str, source: str) -> ast.Module:
    """Return the syntax tree of a source whose functions note that they are called.

    The note has the line number of the first line that the function runs: a tracer counts as many lines as without it.
    """
    tree = ast.parse(source)
    _note_below(tree, file, "", dict(_first_lines(compile(tree, file, "exec", dont_inherit=True))))
    return tree


def _first_lines(code: CodeType) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield ((name, line of its definition), first line it runs) of every function of a code object."""
    for function in code.co_consts:
        if isinstance(function, CodeType):
            yield from _first_lines(function)
            steps = dis.get_instructions(function)
            next(step for step in steps if step.opname == "RESUME")  # Python traces no line before it
            line = next(step.positions.lineno for step in steps if step.positions and step.positions.lineno)
            yield (function.co_name, function.co_firstlineno), line


def _note_below(node: ast.AST, file: str, function: str, first_lines: Mapping[tuple[str, int], int]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{function}.{child.name}".lstrip(".")
            _note_below(child, file, name, first_lines)
            if not isinstance(child, ast.ClassDef):
                start = min(part.lineno for part in (child, *child.decorator_list))
                (note,) = ast.parse(f"{NOTED}.add({f'{file}:{name}'!r})").body
                ast.increment_lineno(note, first_lines[child.name, start] - 1)
                child.body.insert(1 if ast.get_docstring(child, clean=False) is not None else 0, note)
        else:
            _note_below(child, file, function, first_lines)


def install() -> None:
    """Note calls in this process, where WEFT_CALLS asks for it."""
    if folder := os.environ.get(VARIABLE):
        setattr(builtins, NOTED, called)
        sys.meta_path.insert(0, NotingFinder(os.environ[PACKAGES_VARIABLE].split(":")))
        if test := os.environ.get(RUNNING_VARIABLE):  # a child of a test
            name, _, phase = test.rpartition(" ")
            of = name.partition("::")[0] if phase == "(setup)" else name
            atexit.register(lambda: write(Path(folder, f"child-{os.getpid()}.json"), {of: called}))


def write(file: Path, of_tests: Mapping[str, Iterable[str]]) -> None:
    """Write what tests have called."""
    lines = {test: sorted(functions) for test, functions in of_tests.items()}
    file.write_text(json.dumps({test: line for test, line in lines.items() if line}))
