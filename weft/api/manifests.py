"""YAML files and folders -> typed resources, or all problems at once, each with place, fault and remedy."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from weft.api.apikey import APIKey
from weft.api.fields import did_you_mean
from weft.api.loraadapter import LoRAAdapter
from weft.api.meta import API_VERSION
from weft.api.servingpool import ServingPool
from weft.api.yaml_documents import MAX_DEPTH, BadYaml, documents
from weft.domain.text import sanitize

Object = LoRAAdapter | ServingPool | APIKey
KINDS: dict[str, type[LoRAAdapter] | type[ServingPool] | type[APIKey]] = {
    "LoRAAdapter": LoRAAdapter,
    "ServingPool": ServingPool,
    "APIKey": APIKey,
}
SUFFIXES = (".yaml", ".yml", ".json")
STDIN = Path("-")

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 10_000
MAX_PROBLEMS = 100  # of a report; reading stops after them


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault in a manifest. `document` counts from 1 (0: the file itself), `field` is a dotted path or ""."""

    file: str
    document: int
    field: str
    message: str
    object: str = ""

    def __str__(self) -> str:
        place = [self.file, f"document {self.document}" if self.document else "", self.object, self.field]
        return sanitize(f"{', '.join(part for part in place if part)}: {self.message}")


class ManifestError(ValueError):
    """Some manifests are unusable. `problems` is complete up to MAX_PROBLEMS: one round of corrections is enough."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def load(paths: Iterable[str | Path], *, namespace: str = "default") -> list[Object]:
    """Read the objects of files and folders, in order. `namespace` is for objects without a namespace.

    A folder stands for its *.yaml, *.yml and *.json files, sorted, without its subfolders. `-` is standard input.
    Namespaces are allowed and left out. Raises ManifestError.
    """
    reading = _Reading(namespace)
    for path in _files([Path(path) for path in paths], reading.problems):
        if not reading.full:
            reading.file("<stdin>" if path == STDIN else str(path), path)
    return reading.result()


class Document(NamedTuple):
    """A decoded document and its place. `number` counts from 1."""

    file: str
    number: int
    value: object


def load_documents(paths: Iterable[str | Path]) -> list[Document]:
    """Read the documents of files and folders, in order, without validation. Raises ManifestError."""
    reading = _Documents()
    for path in _files([Path(path) for path in paths], reading.problems):
        if not reading.full:
            reading.file("<stdin>" if path == STDIN else str(path), path)
    reading.result()
    return reading.documents


def parse_object(value: object, *, namespace: str = "default") -> Object:
    """Validate a decoded document and return its object. Raises ManifestError."""
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

    @property
    def full(self) -> bool:
        """Whether there are more problems than the report holds."""
        return len(self.problems) > MAX_PROBLEMS

    def result(self) -> list[Object]:
        if self.problems:
            notes = [Problem(self.problems[-1].file, 0, "", "there are more problems")] if self.full else []
            raise ManifestError([*self.problems[:MAX_PROBLEMS], *notes])
        return list(self._objects.values())

    def file(self, name: str, path: Path) -> None:
        try:
            with os.fdopen(0, "rb", closefd=False) if path == STDIN else path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                self._problem(name, 0, "", f"more than {MAX_FILE_BYTES} bytes; split the file")
            else:
                self.text(name, raw.decode())
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            self._problem(name, 0, "", f"not UTF-8 text: {error.reason} at byte {error.start} (line {line})")
        except OSError as error:
            self._problem(name, 0, "", f"cannot be read: {error.strerror}")

    def text(self, name: str, text: str) -> None:
        number = 0
        try:
            for number, value in enumerate(documents(text), start=1):
                if self.full:
                    return
                if value is not None:
                    self.document(name, number, value)
        except BadYaml as error:
            self._problem(name, error.document or number + 1, "", str(error))

    def document(self, name: str, number: int, value: object) -> None:
        if _is_deeper(value, MAX_DEPTH):
            return self._problem(name, number, "", f"nested deeper than {MAX_DEPTH}")
        if not isinstance(value, dict):
            return self._problem(name, number, "", "not a mapping with apiVersion, kind, metadata and spec")
        fields = cast("dict[str, Any]", value)
        kind, version = fields.get("kind"), fields.get("apiVersion")
        if (version, kind) == ("v1", "Namespace"):
            return None  # clusters need them first; on a single machine a namespace exists once an object names it
        if version != API_VERSION:
            return self._problem(name, number, "apiVersion", f"is {str(version)[:100]!r}, it has to be {API_VERSION!r}")
        if not isinstance(kind, str) or kind not in KINDS:
            problem = f"unknown kind {str(kind)[:100]!r}; {did_you_mean(str(kind), list(KINDS))}"
            return self._problem(name, number, "kind", problem)
        metadata = fields.get("metadata")
        if isinstance(metadata, dict) and "namespace" not in metadata:
            fields = {**fields, "metadata": {**metadata, "namespace": self._namespace}}
        try:
            resource = KINDS[kind].model_validate(fields)
        except ValidationError as error:
            label = str(cast("dict[str, Any]", metadata).get("name", "")) if isinstance(metadata, dict) else ""
            name_in_report = f"{kind} {label[:100]}".strip()
            for item in error.errors(include_url=False):
                self.problems.append(Problem(name, number, _path(item["loc"]), _message(item), name_in_report))
            return None
        key = (resource.kind, resource.key)
        if key in self._objects:
            problem = f"{resource.kind} {resource.key} is there twice; the first is in {self._places[key]}"
            return self._problem(name, number, "metadata.name", problem)
        self._objects[key] = resource
        self._places[key] = f"{name}, document {number}"
        return None

    def _problem(self, file: str, document: int, field: str, message: str) -> None:
        self.problems.append(Problem(file, document, field, message))


class _Documents(_Reading):
    """A reading of documents without validation."""

    def __init__(self) -> None:
        super().__init__("")
        self.documents = list[Document]()

    def document(self, name: str, number: int, value: object) -> None:
        self.documents.append(Document(name, number, value))


def _files(paths: list[Path], problems: list[Problem]) -> list[Path]:
    listed: list[Path] = []
    for path in paths:
        try:
            below = path.iterdir() if path.is_dir() else None
            files = sorted(c for c in below if c.suffix in SUFFIXES and c.is_file()) if below is not None else [path]
        except OSError as error:
            problems.append(Problem(str(path), 0, "", f"cannot be read: {error.strerror}"))
            continue
        if not files:
            problems.append(Problem(str(path), 0, "", f"a folder without {', '.join(SUFFIXES)} files"))
        listed += files
    if len(listed) > MAX_FILES:
        problems.append(Problem(str(paths[0]), 0, "", f"{len(listed)} files, the limit is {MAX_FILES}"))
        return []
    return listed


def _is_deeper(value: object, max_depth: int) -> bool:
    """Return whether mappings and lists are nested more than `max_depth` deep: the limit of text, for aliases and
    JSON."""
    if not isinstance(value, dict | list):
        return False
    items = cast("Iterable[object]", value.values() if isinstance(value, dict) else value)
    return max_depth == 0 or any(_is_deeper(item, max_depth - 1) for item in items)


def _path(loc: tuple[str | int, ...]) -> str:
    """The path of a field as the API server writes it: spec.runnerGroups[0].name."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _message(item: Any) -> str:
    """Return pydantic's text, followed by the input if it is short."""
    text = item["msg"].removeprefix("Value error, ")
    value = item["input"]
    if item["type"] in ("missing", "unknown_field") or isinstance(value, dict | list):
        return text
    return f"{text}; it is {str(value)[:100]!r}"
