"""One mutant of one module, compiled when it is imported: no file is written, and no bytecode cache is read or written.

`WEFT_MUTANT=FILE:LINE:OPERATOR`, or `FILE:LINE:OPERATOR:INDEX` where the operator has several places in the line, names
it; FILE is relative to the checkout. `site/sitecustomize.py` installs the hook in every Python process whose PYTHONPATH
has that folder, so in all children too, except those started with `-I`, `-E` or an environment of their own.

| operator | what becomes of it |
|---|---|
| comparison | `<` and `<=`, `>` and `>=`, `==` and `!=`, `in` and `not in`, `is` and `is not` change places |
| boolean | `and` and `or` change places |
| extreme | `min` and `max` change places |
| sign | `+` and `-` change places, also in `+=` and `-=` |
| constant | a number gets one more; those above MAX_CONSTANT and named fractions are tuning, nobody's promise |
| not | `not` is dropped |
| call | a statement that is a call is dropped |
| return | `return True` and `return False` change places |

Left alone: annotations, decorators, `assert`, what is raised, logging, texts, `__all__`, code for type checkers.
"""

import ast
import importlib.machinery
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[3]
VARIABLE = "WEFT_MUTANT"
SEEN_VARIABLE = "WEFT_MUTANT_SEEN"  # a file that is made when a process compiles the mutant
MAX_CONSTANT = 100
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot,
    ast.LtE: ast.Lt, ast.GtE: ast.Gt, ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.IsNot: ast.Is,
}  # fmt: skip
EXTREMES = {"min": "max", "max": "min"}
LOGGERS = {"log", "logger", "logging", "warnings"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class UnknownMutant(ImportError):
    """A name that is no mutant of the source as it is now."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A place of a file and what changes there. `text` (the line) and `function` find it again after edits above it."""

    file: str
    line: int
    operator: str
    index: int
    function: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.operator}" + (f":{self.index}" if self.index else "")


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a source, in its order."""
    return [mutant for mutant, _ in _places(file, source, ast.parse(source))]


def mutated(name: str, source: str) -> ast.Module:
    """The syntax tree of a source with this mutant. Raises UnknownMutant."""
    file, line, operator, index = parse(name)
    tree = ast.parse(source)
    there: list[str] = []
    for mutant, change in _places(file, source, tree):
        if (mutant.line, mutant.operator, mutant.index) == (line, operator, index):
            change()
            return ast.fix_missing_locations(tree)
        there += [mutant.name] if mutant.line == line else []
    known = ", ".join(there) or "none"
    raise UnknownMutant(f"{VARIABLE}: expected a mutant of {file} as it is now, got {name}; line {line} has: {known}")


def parse(name: str) -> tuple[str, int, str, int]:
    """File, line, operator and index of a mutant's name. Raises UnknownMutant."""
    file, *rest = name.split(":")
    if not 2 <= len(rest) <= 3 or not all(number.isdecimal() for number in (rest[0], *rest[2:])):
        raise UnknownMutant(f"{VARIABLE}: expected FILE:LINE:OPERATOR or FILE:LINE:OPERATOR:INDEX, got {name!r}")
    return file, int(rest[0]), rest[1], int(rest[2]) if rest[2:] else 0


def _places(file: str, source: str, tree: ast.Module) -> Iterator[tuple[Mutant, Callable[[], None]]]:
    """Each place, and what changes the tree there. Places are numbered before anything changes."""
    lines, counts = source.splitlines(), Counter[tuple[int, str]]()
    for line, operator, function, change in list(_walk(tree, "")):
        index = counts[line, operator]
        counts[line, operator] += 1
        yield Mutant(file, line, operator, index, function, lines[line - 1].strip()), change


def _walk(node: ast.AST, function: str) -> Iterator[tuple[int, str, str, Callable[[], None]]]:
    """Line, operator, function and change of every place below a node, outer ones first."""
    if _is_left_alone(node):
        return
    for line, operator, change in _changes(node):
        yield line, operator, function, change
    below = f"{function}.{node.name}".lstrip(".") if isinstance(node, FUNCTIONS) else function
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, below)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.MatchValue():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=float())):
            return name.isupper()
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name.lstrip("_") in LOGGERS
        case _:
            return False


def _changes(node: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """What can change in this very node: line, operator and the change."""
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield node.lineno, "comparison", lambda place=place, op=op: _put(ops, place, COMPARISONS[type(op)]())
        case ast.BoolOp(op=op):
            yield node.lineno, "boolean", lambda: _set(node, "op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Call(func=ast.Name(id=("min" | "max") as name) as func):
            yield node.lineno, "extreme", lambda: _set(func, "id", EXTREMES[name])
        case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left, right=right) if not _joins(left, right):
            yield node.lineno, "sign", lambda: _set(node, "op", _other_sign(op))
        case ast.AugAssign(op=ast.Add() | ast.Sub() as op, value=value) if not _joins(value):
            yield node.lineno, "sign", lambda: _set(node, "op", _other_sign(op))
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and value <= MAX_CONSTANT:
            yield node.lineno, "constant", lambda: _set(node, "value", value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node.lineno, "not", lambda: _set(node, "operand", ast.UnaryOp(ast.Not(), operand))  # `not not x`
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call()) as value) if not _makes_base(value):
            call = value.value if isinstance(value, ast.Await) else value
            if not _is_left_alone(call):
                yield node.lineno, "call", lambda: _set(node, "value", ast.Constant(None))
        case ast.Return(value=ast.Constant(value=bool() as value) as constant):
            yield node.lineno, "return", lambda: _set(constant, "value", not value)
        case _:
            pass


def _set(node: ast.AST, field: str, value: object) -> None:
    setattr(node, field, value)


def _put(ops: list[ast.cmpop], place: int, op: ast.cmpop) -> None:
    ops[place] = op


def _other_sign(op: ast.Add | ast.Sub) -> ast.operator:
    return ast.Sub() if isinstance(op, ast.Add) else ast.Add()


def _joins(*operands: ast.expr) -> bool:
    """Say whether it plainly joins texts or sequences: a minus there is an error at once."""
    return any(
        isinstance(each, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in operands
    )


def _makes_base(value: ast.expr) -> bool:
    """Say whether it is `super().__init__()`."""
    match value:
        case ast.Call(func=ast.Attribute(attr="__init__", value=ast.Call(func=ast.Name(id="super")))):
            return True
        case _:
            return False


class MutatingLoader(importlib.machinery.SourceFileLoader):
    """Compiles one mutant, from the source each time: `get_code` is where caches would be read and written."""

    def __init__(self, fullname: str, path: str, mutant: str) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = mutated(self._mutant, self.get_data(path).decode())
        if seen := os.environ.get(SEEN_VARIABLE):
            Path(seen).touch()
        return compile(tree, path, "exec", dont_inherit=True)


class MutatingFinder:
    """Finds the one module that has a mutant; all others are the business of those after it."""

    def __init__(self, name: str) -> None:
        """Raises UnknownMutant."""
        self._name, self._path = name, ROOT / parse(name)[0]
        if not self._path.is_file():
            raise UnknownMutant(f"{VARIABLE}: expected a file of {ROOT}, got {name}, whose file is not there")
        self._module = self._path.parent.name if self._path.stem == "__init__" else self._path.stem

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the mutated module; None for every other one."""
        if fullname.rpartition(".")[2] != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or not spec.origin or Path(spec.origin).resolve() != self._path.resolve():
            return None
        spec.loader = MutatingLoader(fullname, spec.origin, self._name)
        spec.cached = None
        return spec


def install() -> None:
    """Mutate what WEFT_MUTANT names in this process, if it names something. Raises UnknownMutant."""
    if name := os.environ.get(VARIABLE):
        sys.meta_path.insert(0, MutatingFinder(name))
