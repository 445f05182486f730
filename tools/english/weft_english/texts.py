"""Read the texts and names of Python files and pages."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`]*`|https?://\S+|<[^>]+>")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_DIRECTIVE = re.compile(r"#\s*(noqa|type:|pyright:|fmt:|pragma|ruff:|!)")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Texts:
    """The texts of a file by kind, as paragraphs without code, and the names that it binds."""

    docstrings: list[str] = field(default_factory=list[str])
    """The first paragraph of each docstring of a class or function."""
    details: list[str] = field(default_factory=list[str])
    """Further paragraphs of docstrings, docstrings of modules and attributes, and comments."""
    messages: list[str] = field(default_factory=list[str])
    """String literals of six words or more: errors, `--help`, log lines and conditions."""
    pages: list[str] = field(default_factory=list[str])
    """Paragraphs, list items and table cells of Markdown pages."""
    names: list[str] = field(default_factory=list[str])
    """Variables and parameters, once for each place that binds the name."""
    public_docstrings: int = 0


def read_python(source: str) -> Texts:
    """Return the texts and names of a Python module."""
    texts = Texts()
    tree = ast.parse(source)
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            texts.names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            texts.names.append(node.id)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for position, constant in _docstrings(node.body):
                documented.add(id(constant))
                first, *rest = _paragraphs(str(constant.value))
                is_definition = position == 0 and isinstance(node, _DEFINITIONS)
                (texts.docstrings if is_definition else texts.details).append(first)
                texts.details.extend(rest)
                if is_definition and not getattr(node, "name", "_").startswith("_"):
                    texts.public_docstrings += 1
    inside_f_strings = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        message = _message(node)
        if id(node) not in documented | inside_f_strings and len(message.split()) >= 6:
            texts.messages.append(message)
    texts.details.extend(_comments(source))
    return texts


def read_page(source: str) -> Texts:
    """Return the paragraphs, list items and table cells of a Markdown page, without its code blocks."""
    texts = Texts()
    for block in re.split(r"\n\s*\n", _FENCE.sub("\n\n", source)):
        for item in re.split(r"\n(?=\s*(?:[-*|#]|\d+\.)\s*)", block):
            for cell in item.split("|") if item.lstrip().startswith("|") else [item]:
                text = plain(_LINK.sub(r"\1", cell).lstrip(" -*#"))
                if re.search(r"\w", text):
                    texts.pages.append(text)
    return texts


def plain(text: str) -> str:
    """Join lines, and replace each piece of code and each address by one neutral word."""
    return " ".join(_CODE.sub("CODE", text).split())


def _docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, ast.Constant]]:
    before: ast.stmt | None = None
    for position, statement in enumerate(body):
        if position == 0 or isinstance(before, ast.Assign | ast.AnnAssign):
            constant = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield position, constant
        before = statement


def _paragraphs(text: str) -> list[str]:
    return [plain(paragraph) for paragraph in re.split(r"\n\s*\n", text.strip())]


def _message(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
        return plain("".join(str(part) for part in parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return plain(node.value)
    return ""


def _comments(source: str) -> Iterator[str]:
    """Yield each comment. Comments on consecutive lines of their own are one comment."""
    lines: list[str] = []
    last_row = -1
    alone = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        row = token.start[0]
        continues = alone and row == last_row + 1
        alone = token.line.strip() == token.string
        if lines and not (continues and alone):
            yield plain(" ".join(lines))
            lines = []
        lines.append(token.string.lstrip("# "))
        last_row = row
    if lines:
        yield plain(" ".join(lines))
