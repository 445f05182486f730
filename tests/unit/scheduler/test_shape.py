"""The shape of the scheduler's and the supervisor's code: who writes what, and how large a class is.

Records, settings and messages (frozen, or without a method that changes them) are exempt.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import weft_scheduler.core
import weft_supervisor.core

CORES = [Path(str(package.__file__)).parent for package in (weft_scheduler.core, weft_supervisor.core)]
PACKAGES = [core.parent for core in CORES]
RECORDS = {"NamedTuple", "Enum", "StrEnum", "Protocol", "Exception", "ServiceSettings"}
CONTAINERS = ("dict", "set", "list", "Counter", "deque", "OrderedDict")
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
MAX_MEMBERS = 15  # public methods, and public attributes, of a class


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


def writers(folders: list[Path]) -> dict[str, dict[Path, list[str]]]:
    """Return for each attribute the files that write it outside of its class, with line and text."""
    trees = dict(sources(folders))
    owners: dict[str, set[Path]] = defaultdict(set)
    held: set[str] = set()
    for path, tree in trees.items():
        for of in classes(tree):
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


def strangers(folders: list[Path]) -> list[str]:
    """Return writes to an attribute from another file than its class's. A table of `State` may have one such file."""
    return [
        text
        for files in writers(folders).values()
        for texts in files.values()
        for text in texts
        if len(files) > 1 or " state." not in text
    ]


def test_every_attribute_is_written_by_the_file_of_its_class() -> None:
    assert strangers(CORES) == []


def test_a_write_from_elsewhere_is_found(tmp_path: Path) -> None:
    fields = "self.runners: dict[str, int] = {}\n        self.size = 0\n        self.table: dict[str, int] = {}\n"
    (tmp_path / "one.py").write_text(f"class Pool:\n    def __init__(self):\n        {fields}")
    writes = ["pool.runners['a'] = 1", "pool.size += 1", "del pool.runners['a']", "pool.runners.clear()"]
    (tmp_path / "two.py").write_text("\n".join([*writes, "state.table['a'] = 1", "self.size = 1"]))
    found = ["pool.runners", "pool.runners", "pool.runners", "pool.size"]
    assert sorted(one.partition(" ")[2] for one in strangers([tmp_path])) == found
    (tmp_path / "three.py").write_text("state.table.pop('a')")
    assert sorted(one.partition(" ")[2] for one in strangers([tmp_path])) == [*found, "state.table", "state.table"]


def test_no_class_has_more_public_members_than_one_holds_in_the_head() -> None:
    sizes = {
        f"{path.name} {of.name}": (
            sum(not function.name.startswith("_") for function in functions(of)),
            sum(not name.startswith("_") for name in attributes(of)),
        )
        for path, tree in sources(PACKAGES)
        for of in classes(tree)
    }
    assert {name: size for name, size in sizes.items() if max(size) > MAX_MEMBERS} == {}
