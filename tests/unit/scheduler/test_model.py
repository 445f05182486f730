"""The objects of `core/model` and `core/pool` own their fields: others read them, and call their methods."""

import ast
from pathlib import Path

import weft_scheduler.core

CORE = Path(weft_scheduler.core.__file__).parent
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
CONTAINERS = ("dict", "set", "list", "Counter")


def fields() -> tuple[set[str], set[str]]:
    """(every field of the model's classes, those that are containers)."""
    names: set[str] = set()
    containers: set[str] = set()
    for path in (*(CORE / "model").glob("*.py"), *(CORE / "pool").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign):
                name = node.target.attr if isinstance(node.target, ast.Attribute) else ast.unparse(node.target)
                names.add(name)
                if ast.unparse(node.annotation).startswith(CONTAINERS):
                    containers.add(name)
            elif isinstance(node, ast.Assign):
                targets = [t for target in node.targets for t in ast.walk(target)]
                names |= {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    return names, containers


def written(tree: ast.AST, names: set[str], containers: set[str]) -> list[str]:
    """Writes to fields of something else than `self`."""
    found: list[str] = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        for target in [t for one in targets for t in (one.elts if isinstance(one, ast.Tuple) else [one])]:
            owner = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(owner, ast.Attribute) and owner.attr in names and ast.unparse(owner.value) != "self":
                found.append(ast.unparse(target))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = node.func.value
            if isinstance(owner, ast.Attribute) and owner.attr in containers and ast.unparse(owner.value) != "self":
                found.append(ast.unparse(node))
    return found


def test_only_the_models_own_methods_write_its_fields() -> None:
    names, containers = fields()
    for path in CORE.rglob("*.py"):
        if path.parent.name not in ("model", "pool"):
            writes = written(ast.parse(path.read_text()), names, containers)
            of_model = [w for w in writes if not w.startswith(("state.", "self._state.", "published."))]
            assert not of_model, (path.name, of_model)


def test_a_write_is_found() -> None:
    code = "request.epoch = 3\nrunner.owned.add(1)\npool.runners['a'] = 1\nself.epoch = 2\nrequest.stop()"
    found = written(ast.parse(code), *fields())
    assert sorted(found) == ["pool.runners['a']", "request.epoch", "runner.owned.add(1)"]
