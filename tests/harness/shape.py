"""The shape of a package's code: the writers of each attribute.

Records, settings and messages (frozen, or without a method that changes them) are exempt.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

RECORDS = {"NamedTuple", "Enum", "StrEnum", "Protocol", "Exception", "ServiceSettings"}
CONTAINERS = ("dict", "set", "list", "Counter", "deque", "OrderedDict")
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
NO_RECORDS: frozenset[str] = frozenset()


def sources(folders: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text())


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the classes that are no records."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
            frozen = any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not frozen and not bases & RECORDS and not any(base.endswith("Error") for base in bases):
                yield node


def functions(of: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in of.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def attributes(of: ast.ClassDef) -> set[str]:
    """Return the names that a class's methods assign to on `self`, and its annotated fields."""
    fields = [node for node in of.body if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node)]
    names = {ast.unparse(field.target) for field in fields}
    for function in functions(of):
        assigned = [target for node in ast.walk(function) for target in targets(node)]
        names |= {one.attr for one in assigned if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"}
    return names


def containers(of: ast.ClassDef) -> set[str]:
    """Return the attributes of a class that are annotated as containers."""
    found: set[str] = set()
    for node in ast.walk(of):
        match node:
            case ast.AnnAssign(target=target, annotation=kind) if ast.unparse(kind).startswith(CONTAINERS):
                found.add(ast.unparse(target).removeprefix("self."))
            case _:
                pass
    return found


def targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets that one statement assigns to or deletes; for `a.b[c]` that is `a.b`."""
    match node:
        case ast.Assign() | ast.Delete():
            found = node.targets
        case ast.AugAssign() | ast.AnnAssign():
            found = [node.target]
        case _:
            return []
    flat = [one for target in found for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [one.value if isinstance(one, ast.Subscript) else one for one in flat]


def changed(node: ast.AST, names: set[str]) -> list[ast.expr]:
    """Return the container that one call of its method changes."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name) as of, attr=method)):
            return [of] if method in CHANGES and name in names else []
        case _:
            return []


def writers(folders: list[Path], records: frozenset[str]) -> dict[str, dict[Path, list[str]]]:
    """Return for each attribute the files that write it outside of its class, with line and text."""
    trees = dict(sources(folders))
    owners: dict[str, set[Path]] = defaultdict(set)
    held: set[str] = set()
    for path, tree in trees.items():
        for of in classes(tree):
            if of.name in records:
                continue
            held |= containers(of)
            for name in attributes(of):
                owners[name].add(path)
    found: dict[str, dict[Path, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for one in (*targets(node), *changed(node, held)):
                of = ast.unparse(one.value) if isinstance(one, ast.Attribute) and one.attr in owners else "self"
                if of != "self" and isinstance(one, ast.Attribute) and (of == "state" or path not in owners[one.attr]):
                    found[one.attr][path].append(f"{path.name}:{one.lineno} {ast.unparse(one)}")
    return found


def strangers(folders: list[Path], records: frozenset[str] = NO_RECORDS) -> list[str]:
    """Return writes to an attribute from another file than its class's. A table of `State` may have one such file.

    `records`: names of classes whose fields are written by whoever holds them.
    """
    return [
        text
        for files in writers(folders, records).values()
        for texts in files.values()
        for text in texts
        if len(files) > 1 or " state." not in text
    ]
