"""YAML files and folders -> typed resources, or every problem at once: where it is, what is wrong, what to do.

YAML from strangers is bounded before it is built: bytes, documents, depth, and nodes after every alias is followed (a
few lines of nested aliases can stand for billions of nodes). A key that appears twice in a mapping is an error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from weft.api.fields import nearest
from weft.api.loraadapter import LoRAAdapter
from weft.api.meta import API_VERSION
from weft.api.servingpool import ServingPool

Object = LoRAAdapter | ServingPool
KINDS: dict[str, type[LoRAAdapter] | type[ServingPool]] = {"LoRAAdapter": LoRAAdapter, "ServingPool": ServingPool}
SUFFIXES = (".yaml", ".yml", ".json")

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 10_000
MAX_DOCUMENTS = 20_000  # in one file
MAX_DEPTH = 40
MAX_NODES = 20_000  # in one document, aliases followed
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. `document` counts from 1 (0: the file itself), `field` is a dotted path or ""."""

    file: str
    document: int
    field: str
    message: str
    object: str = ""

    def __str__(self) -> str:
        where = [self.file, f"document {self.document}" if self.document else "", self.object, self.field]
        return f"{', '.join(part for part in where if part)}: {self.message}"


class ManifestError(ValueError):
    """Some manifests cannot be used; `problems` is complete, so one correction round is enough."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def load(paths: Iterable[str | Path], *, namespace: str = "default") -> list[Object]:
    """Every object of these files and folders, in order; `namespace` is for objects that name none.

    A folder stands for its *.yaml, *.yml and *.json files, sorted, without its subfolders. Raises ManifestError.
    """
    reading = _Reading(namespace)
    for path in _files([Path(path) for path in paths], reading.problems):
        reading.file(str(path), path)
    return reading.result()


def load_text(text: str, *, name: str = "<text>", namespace: str = "default") -> list[Object]:
    """As `load`, from text. Raises ManifestError."""
    reading = _Reading(namespace)
    reading.text(name, text)
    return reading.result()


def parse_object(value: object, *, namespace: str = "default") -> Object:
    """One decoded document -> its object. Raises ManifestError."""
    reading = _Reading(namespace)
    reading.document("<object>", 1, value)
    return reading.result()[0]


class _Reading:
    """Objects and problems gathered from several files."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._objects: dict[tuple[str, str], Object] = {}
        self._places: dict[tuple[str, str], str] = {}
        self.problems: list[Problem] = []

    def result(self) -> list[Object]:
        if self.problems:
            raise ManifestError(self.problems)
        return list(self._objects.values())

    def file(self, name: str, path: Path) -> None:
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                self._problem(name, 0, "", f"more than {MAX_FILE_BYTES} bytes; split the file")
            else:
                self.text(name, raw.decode())
        except UnicodeDecodeError as error:
            self._problem(name, 0, "", f"not UTF-8 text: {error.reason} at byte {error.start}")
        except OSError as error:
            self._problem(name, 0, "", f"cannot be read: {error.strerror}")

    def text(self, name: str, text: str) -> None:
        number = 0
        try:
            check_events(text)
            for number, value in enumerate(_documents(text), start=1):
                if value is not None:
                    self.document(name, number, value)
        except _BadYaml as error:
            self._problem(name, error.document or number + 1, "", str(error))
        except yaml.YAMLError as error:  # a tag that is not plain YAML: found while building
            self._problem(name, number + 1, "", f"no valid YAML: {_one_line(error)}")

    def document(self, name: str, number: int, value: object) -> None:
        if not isinstance(value, dict):
            return self._problem(name, number, "", "not a mapping with apiVersion, kind, metadata and spec")
        fields = cast("dict[str, Any]", value)
        if (kind := self._kind(name, number, fields)) is None:
            return None
        metadata = fields.get("metadata")
        if isinstance(metadata, dict) and "namespace" not in metadata:
            fields = {**fields, "metadata": {**metadata, "namespace": self._namespace}}
        try:
            self._add(name, number, kind.model_validate(fields))
        except ValidationError as error:
            self._fields_wrong(name, number, fields, error)

    def _kind(self, name: str, number: int, fields: dict[str, Any]) -> type[LoRAAdapter] | type[ServingPool] | None:
        kind, version = fields.get("kind"), fields.get("apiVersion")
        if version != API_VERSION:
            self._problem(name, number, "apiVersion", f"is {str(version)[:100]!r}, it has to be {API_VERSION!r}")
        elif kind not in KINDS:
            self._problem(name, number, "kind", f"unknown kind {str(kind)[:100]!r}; {nearest(str(kind), list(KINDS))}")
        else:
            return KINDS[str(kind)]
        return None

    def _add(self, name: str, number: int, found: Object) -> None:
        key = (found.kind, found.key)
        if key in self._objects:
            what = f"{found.kind} {found.key} is there twice; the first is in {self._places[key]}"
            return self._problem(name, number, "metadata.name", what)
        self._objects[key] = found
        self._places[key] = f"{name}, document {number}"
        return None

    def _fields_wrong(self, name: str, number: int, fields: dict[str, Any], error: ValidationError) -> None:
        metadata = fields.get("metadata")
        label = str(cast("dict[str, Any]", metadata).get("name", "")) if isinstance(metadata, dict) else ""
        for item in error.errors(include_url=False):
            path = ".".join(str(part) for part in item["loc"])
            self.problems.append(Problem(name, number, path, _message(item), f"{fields['kind']} {label[:100]}".strip()))

    def _problem(self, file: str, document: int, field: str, message: str) -> None:
        self.problems.append(Problem(file, document, field, message))


class _BadYaml(Exception):
    """YAML that is well-formed and not acceptable."""

    def __init__(self, message: str, mark: Any = None, document: int = 0) -> None:
        super().__init__(f"{message} (line {mark.line + 1})" if mark else message)
        self.document = document


def check_events(text: str) -> None:
    """Depth and number of documents, before anything is built (building recurses). Raises _BadYaml."""
    depth = documents = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if depth > MAX_DEPTH:
                raise _BadYaml(f"nested deeper than {MAX_DEPTH}", event.start_mark, documents)
            if documents > MAX_DOCUMENTS:
                raise _BadYaml(f"more than {MAX_DOCUMENTS} documents; split the file", event.start_mark, documents)
    except yaml.YAMLError as error:
        raise _BadYaml(f"no valid YAML: {_one_line(error)}", document=max(documents, 1)) from error


def _documents(text: str) -> Iterator[object]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            _measure(node, {})
            yield loader.construct_document(node)
    finally:
        loader.dispose()


def _measure(node: Any, sizes: dict[int, int]) -> int:
    """Nodes below `node` with every alias followed; a node on the way to itself counts as -1."""
    if id(node) in sizes:
        if sizes[id(node)] < 0:
            raise _BadYaml("an alias refers to what it is part of", node.start_mark)
        return sizes[id(node)]
    sizes[id(node)] = -1
    size = 1 + sum(_measure(child, sizes) for child in _children(node))
    if size > MAX_NODES:
        raise _BadYaml(f"more than {MAX_NODES} values, aliases followed", node.start_mark)
    sizes[id(node)] = size
    return size


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _BadYaml("a key that is not a plain word", key.start_mark)
            if key.value in seen:
                raise _BadYaml(f"the key {key.value[:100]!r} is there twice", key.start_mark)
            seen.add(key.value)
            yield value


def _files(paths: list[Path], problems: list[Problem]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = sorted(child for child in path.iterdir() if child.suffix in SUFFIXES and child.is_file())
            if not below:
                problems.append(Problem(str(path), 0, "", f"a folder without {', '.join(SUFFIXES)} files"))
            found += below
        else:
            found.append(path)
    if len(found) > MAX_FILES:
        problems.append(Problem(str(paths[0]), 0, "", f"{len(found)} files, the limit is {MAX_FILES}"))
        return []
    return found


def _message(item: Any) -> str:
    """pydantic's text, with what it was about where that is short."""
    text = item["msg"].removeprefix("Value error, ")
    value = item["input"]
    if item["type"] in ("missing", "unknown_field") or isinstance(value, dict | list):
        return text
    return f"{text}; it is {str(value)[:100]!r}"


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())[:300]
