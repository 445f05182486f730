"""Docstrings stand alone and limits are called MAX and MIN, in every file."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FRAGMENT = re.compile(r"\W*(of|as|by|and|so|that|those|its?|they|see|where|which)\b", re.IGNORECASE)
SO_MANY = re.compile(r"\bso\s+(many|much)\b", re.IGNORECASE)
RAISES = re.compile(r"(?:^|[.):]\s+)Raises\s(.*)", re.DOTALL)
NEXT_SENTENCE = re.compile(r"[.)]\s+(?!Raises\b)[A-Z`\[(]")
OLD_LIMIT = re.compile(r"""^[^\n#=("']*\b(_*(?:MOST|LEAST)_\w+)[^\n=]*=(?!=)""", re.MULTILINE)


def docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """The docstring of a module, class or function, and the texts below its attributes, with their lines."""
    before: ast.stmt | None = None
    for statement in body:
        if before is None or isinstance(before, ast.Assign | ast.AnnAssign):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value
        before = statement


def with_docstrings(module: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a module, its classes and functions. Expressions, most of a tree, are passed over."""
    blocks: list[ast.AST] = [module]
    while blocks:
        block = blocks.pop(0)
        if isinstance(block, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield block
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            blocks += [node for node in getattr(block, name, ()) if not isinstance(node, ast.Expr)]


def findings(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in with_docstrings(ast.parse(text)):
        for line, docstring in docstrings(node.body):
            if FRAGMENT.match(docstring):
                yield f"{line}: begins as a fragment; say what it is, or with a verb what it does"
            if (raises := RAISES.search(docstring)) and NEXT_SENTENCE.search(raises[1]):
                yield f"{line}: a sentence after `Raises`; `Raises` stands last"
            if SO_MANY.search(docstring):
                yield f"{line}: so many or so much; name the parameter"
    for limit in OLD_LIMIT.finditer(text):
        yield f"{text.count(chr(10), 0, limit.start(1)) + 1}: {limit[1]}; a limit is MAX_ or MIN_, its unit last"
    if SO_MANY.search(text):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and SO_MANY.search(token.string):
                yield f"{token.start[0]}: so many or so much; name the value"


def test_docstrings_stand_alone_and_limits_are_max_and_min() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    wrong = [
        f"{name}:{finding}"
        for name in tracked
        if "_pb2" not in name and (ROOT / name).exists()
        for finding in findings(ROOT / name)
    ]
    assert not wrong, "\n".join(wrong)


def test_each_fault_is_found_once(tmp_path: Path) -> None:
    source = tmp_path / "bad.py"
    source.write_text(
        '"""Of a module."""\nMOST_PAGES = 1\n"""Where pages are."""\nsizes = [1]  # so many\n'
        'def take(n):\n    """Take so many. Raises ValueError. Or returns."""\n'
        'def give(n):\n    """Give `n` pages. Raises ValueError for n < 0 (e.g. -1). Raises OSError."""\n'
    )
    assert [int(finding.split(":")[0]) for finding in findings(source)] == [1, 3, 6, 6, 2, 4]
