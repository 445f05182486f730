"""YAML text -> documents, with limits before construction and strict values.

Foreign YAML is checked first: documents, depth, and nodes and characters with every alias followed (a few lines of
nested aliases can stand for billions of nodes). A repeated key in a mapping is an error. So is a scalar with the form
of a number or a date and an invalid value (PyYAML raises arbitrary Python errors for it). Tags without a JSON
equivalent (`!!binary`, `!!set`) are unknown.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml

from weft.domain.text import quoted

MAX_DOCUMENTS = 20_000  # in one text
MAX_DEPTH = 40
MAX_NODES = 20_000  # in one document, aliases followed
MAX_CHARS = 1 << 20  # in a document, aliases followed: the limit of the local API for an object
MAX_TEXT_NODES, MAX_TEXT_CHARS = 1_000_000, 64 << 20  # in one text, likewise
MAX_INTEGER_BITS = 64
MAX_SPECIAL_CHARS = 100  # of scalars other than text: Python takes minutes to parse a million digits
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NO_JSON = {f"tag:yaml.org,2002:{name}" for name in ("binary", "omap", "pairs", "set")}
_TOO_MUCH = f"more than {MAX_TEXT_NODES} values or {MAX_TEXT_CHARS} characters in a file"
_TEXT = "tag:yaml.org,2002:str"
_NO_VALUE = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)  # 2020-13-45, 6,000 digits, !!bool x


class BadYaml(Exception):
    """Well-formed but unacceptable YAML."""

    def __init__(self, message: str, mark: Any = None, document: int = 0) -> None:
        super().__init__(f"{message} (line {mark.line + 1})" if mark else message)
        self.document = document


def documents(text: str) -> Iterator[object]:
    """Yield the documents of a text, in order. Raises BadYaml."""
    _check_events(text)
    loader = _Loader(text)
    nodes = chars = 0
    try:
        while loader.check_node():
            node = loader.get_node()
            size = _measure(node, {})
            nodes, chars = nodes + size[0], chars + size[1]
            if nodes > MAX_TEXT_NODES or chars > MAX_TEXT_CHARS:
                raise BadYaml(f"{_TOO_MUCH}, aliases followed; split the file", node.start_mark)
            yield loader.construct_document(node)
    except yaml.YAMLError as error:  # an unknown tag
        raise BadYaml(f"no valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()


def _check_events(text: str) -> None:
    """Check depth and counts before any construction, since construction recurses. Raises BadYaml."""
    depth = documents = nodes = earlier_nodes = (
        0  # nodes: of the text, keys included; earlier_nodes: of finished documents
    )
    try:
        for event in yaml.parse(text, Loader=_Loader):
            nodes += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.DocumentStartEvent):
                documents, earlier_nodes = documents + 1, nodes
            if nodes - earlier_nodes > 2 * MAX_NODES:
                raise BadYaml(f"more than {MAX_NODES} values", event.start_mark, documents)
            if nodes > 2 * MAX_TEXT_NODES:
                raise BadYaml(f"{_TOO_MUCH}; split the file", event.start_mark, documents)
            if depth > MAX_DEPTH:
                raise BadYaml(f"nested deeper than {MAX_DEPTH}", event.start_mark, documents)
            if documents > MAX_DOCUMENTS:
                raise BadYaml(f"more than {MAX_DOCUMENTS} documents; split the file", event.start_mark, documents)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise BadYaml(f"no valid YAML: {_one_line(error)}", document=max(documents, 1)) from error


class _Loader(_SafeLoader):
    """A loader of plain YAML. A scalar with an invalid value is an error with its line."""

    yaml_constructors: ClassVar[Any] = {
        tag: make for tag, make in _SafeLoader.yaml_constructors.items() if tag not in _NO_JSON
    }

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        type_name = node.tag.rpartition(":")[2]
        if isinstance(node, yaml.ScalarNode) and node.tag != _TEXT and len(node.value) > MAX_SPECIAL_CHARS:
            reason = f"it has {len(node.value)} characters"
            raise BadYaml(f"{quoted(node.value)} is no {type_name}: {reason}", node.start_mark)
        try:
            value = super().construct_object(node, deep)
        except _NO_VALUE as error:
            raise BadYaml(f"{quoted(node.value)} is no {type_name}: {str(error)[:100]}", node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise BadYaml(f"{quoted(node.value)} is beyond {MAX_INTEGER_BITS} bits", node.start_mark)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadYaml(f"{quoted(node.value)} is not a JSON number", node.start_mark)
        return value


def _measure(node: Any, sizes: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Count the values and characters of `node` with every alias followed. `sizes`: by node; None: being counted."""
    if id(node) in sizes:
        if (counted := sizes[id(node)]) is None:
            raise BadYaml("an alias refers to a node that contains it", node.start_mark)
        return counted
    sizes[id(node)] = None
    nodes, chars = 1, _chars(node)
    for child in _children(node):
        of_child = _measure(child, sizes)
        nodes, chars = nodes + of_child[0], chars + of_child[1]
    if nodes > MAX_NODES:
        raise BadYaml(f"more than {MAX_NODES} values, aliases followed", node.start_mark)
    if chars > MAX_CHARS:
        raise BadYaml(f"more than {MAX_CHARS} characters, aliases followed", node.start_mark)
    sizes[id(node)] = nodes, chars
    return nodes, chars


def _chars(node: Any) -> int:
    """Return the characters of a scalar, or of a mapping's keys."""
    if isinstance(node, yaml.ScalarNode):
        return len(node.value)
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return sum(len(key.value) for key, _ in pairs)


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise BadYaml("a key is not a plain scalar", key.start_mark)
            if key.value in seen:
                raise BadYaml(f"the key {key.value[:100]!r} is there twice", key.start_mark)
            seen.add(key.value)
            yield value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
