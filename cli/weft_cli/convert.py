"""`weft convert`: manifests of an earlier form of v1alpha1 become ones of today's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from weft.api.conversion import convert as converted
from weft.api.manifests import ManifestError, load_documents, parse_object
from weft.api.meta import API_VERSION
from weft_cli.errors import BadInput
from weft_cli.output import note, say


def convert(files: Sequence[Path]) -> None:
    """Print the documents of the files in today's form; say on standard error what has no successor.

    Objects of other groups pass as they are, and so do lists, item by item. Raises BadInput if a document cannot be
    read, or is wrong in today's form too.
    """
    if not files:
        raise BadInput("there is nothing to convert", "weft convert -f FILE, or -f - for standard input")
    notes, wrong, documents_out = list[str](), list[str](), list[object]()
    try:
        for file, number, value in load_documents(files):
            documents_out.append(_document(value, f"{file}, document {number}", notes, wrong))
    except ManifestError as error:
        raise BadInput(str(error)) from error
    if wrong:
        raise BadInput("\n".join(wrong))
    say(yaml.safe_dump_all(documents_out, sort_keys=False, allow_unicode=True), end="")
    for sentence in notes:
        note(sentence)


def _document(value: object, place: str, notes: list[str], wrong: list[str]) -> object:
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if fields.get("kind") == "List" and isinstance(items := fields.get("items"), list):
        return {**fields, "items": [_document(item, place, notes, wrong) for item in cast("list[object]", items)]}
    if fields.get("apiVersion") != API_VERSION:
        return fields
    obj, lost = converted(fields)
    name = f"{place}, {obj.get('kind')} {(obj.get('metadata') or {}).get('name')}"
    notes.extend(f"{name}: {sentence}" for sentence in lost)
    try:
        parse_object({key: value for key, value in obj.items() if key != "status"})
    except ManifestError as error:
        wrong.extend(f"{name}, {problem.field}: {problem.message}" for problem in error.problems)
    return dict(obj)
