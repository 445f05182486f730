"""YAML text -> documents, bounded before they are built and without surprises while they are.

YAML from strangers is bounded first: documents, depth, and nodes after every alias is followed (a few lines of nested
aliases can stand for billions of nodes). A key that appears twice in a mapping is an error, and so is a scalar that
looks like a number or a date and is none (PyYAML raises whatever Python does there).
"""

from collections.abc import Iterator
from typing import Any

import yaml

from weft.printable import quoted

MAX_DOCUMENTS = 20_000  # in one text
MAX_DEPTH = 40
MAX_NODES = 20_000  # in one document, aliases followed
MAX_INTEGER_BITS = 64
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NO_VALUE = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)  # 2020-13-45, 6,000 digits, !!bool x


class BadYaml(Exception):
    """YAML that is well-formed and not acceptable."""

    def __init__(self, message: str, mark: Any = None, document: int = 0) -> None:
        super().__init__(f"{message} (line {mark.line + 1})" if mark else message)
        self.document = document


def documents(text: str) -> Iterator[object]:
    """The documents of a text, in order. Raises BadYaml."""
    _check_events(text)
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            _measure(node, {})
            yield loader.construct_document(node)
    except yaml.YAMLError as error:  # a tag that is not plain YAML
        raise BadYaml(f"no valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()


def _check_events(text: str) -> None:
    """Depth and number of documents, before anything is built (building recurses). Raises BadYaml."""
    depth = documents = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if depth > MAX_DEPTH:
                raise BadYaml(f"nested deeper than {MAX_DEPTH}", event.start_mark, documents)
            if documents > MAX_DOCUMENTS:
                raise BadYaml(f"more than {MAX_DOCUMENTS} documents; split the file", event.start_mark, documents)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise BadYaml(f"no valid YAML: {_one_line(error)}", document=max(documents, 1)) from error


class _Loader(_SafeLoader):
    """Plain YAML whose every scalar is a value, or is named with its line."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except _NO_VALUE as error:
            what = node.tag.rpartition(":")[2]
            raise BadYaml(f"{quoted(node.value)} is no {what}: {str(error)[:100]}", node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise BadYaml(f"{quoted(node.value)} is beyond {MAX_INTEGER_BITS} bits", node.start_mark)
        return value


def _measure(node: Any, sizes: dict[int, int]) -> int:
    """Nodes below `node` with every alias followed; a node on the way to itself counts as -1."""
    if id(node) in sizes:
        if sizes[id(node)] < 0:
            raise BadYaml("an alias refers to what it is part of", node.start_mark)
        return sizes[id(node)]
    sizes[id(node)] = -1
    size = 1 + sum(_measure(child, sizes) for child in _children(node))
    if size > MAX_NODES:
        raise BadYaml(f"more than {MAX_NODES} values, aliases followed", node.start_mark)
    sizes[id(node)] = size
    return size


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise BadYaml("a key that is not a plain word", key.start_mark)
            if key.value in seen:
                raise BadYaml(f"the key {key.value[:100]!r} is there twice", key.start_mark)
            seen.add(key.value)
            yield value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
