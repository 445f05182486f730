"""Identifiers are the field's terms (docs/glossary.md): everyday verbs and private metaphors stay out of them."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("weft", "services", "kernels", "sim")
WORDS = {
    "anybody", "borrow", "borrowed", "borrower", "borrowers", "choose", "chooser", "chooses", "chosen", "forgave",
    "forgive", "forgiven", "hear", "heard", "heed", "heeded", "lend", "lends", "lent", "life", "lives", "look", "looks",
    "move", "moved", "moves", "nobody", "room", "rooms", "said", "say", "says", "shelf", "shelve", "shelves",
    "somebody", "tell", "tells", "told", "unlend", "whoever", "wish", "wishes", "word",
}  # fmt: skip
OF_OTHERS = {"moves", "tell"}  # a column of the store, files of Python


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield what a module defines: functions, classes, arguments, variables, fields and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno, isinstance(node, ast.ClassDef)
            case ast.arg(arg=name):
                yield name, node.lineno, False
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno, False
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno, False
            case _:
                pass


@cache
def defined() -> list[tuple[str, str, int, bool]]:
    """Return (path, name, line, whether it is a class) of all identifiers: both tests read them."""
    return [
        (str(path.relative_to(ROOT)), name, line, is_class)
        for path in modules()
        for name, line, is_class in identifiers(ast.parse(path.read_text()))
    ]


def words(name: str) -> set[str]:
    """`take_newlyLent` -> take, newly, lent."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def modules() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if name.endswith(".py") and "_pb2" not in name]


def test_identifiers_use_the_fields_terms() -> None:
    found = [
        f"{path}:{line}: {name}" for path, name, line, _ in defined() if words(name) & WORDS and name not in OF_OTHERS
    ]
    found += [str(path.relative_to(ROOT)) for path in modules() if words(path.stem) & WORDS]
    assert not found, "\n".join(found)


def test_a_class_has_a_name_of_its_own() -> None:
    """Private classes are their module's own."""
    seen: dict[str, list[str]] = {}
    for path, name, _, is_class in defined():
        if is_class and not name.startswith("_"):
            seen.setdefault(name, []).append(path)
    several = [f"{name}: {', '.join(paths)}" for name, paths in sorted(seen.items()) if len(paths) > 1]
    assert not several, "\n".join(several)
