"""A reader of training data: .jsonl, .jsonl.gz, .csv, .csv.gz with a prompt and a length in tokens per row."""

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from weft_predictor.errors import BadData

PROMPT_COLUMNS = ("prompt", "prompt_text", "instruction", "question", "text")
LENGTH_COLUMNS = ("n_out", "output_tokens", "completion_tokens", "length", "output_length", "tokens")
ADAPTER_COLUMNS = ("adapter", "model_name", "model", "category")
PROMPT_TOKENS_COLUMNS = ("n_in", "prompt_tokens", "input_tokens")
MAX_ANSWER_TOKENS = 1_000_000
CHARS_PER_TOKEN = 4  # only for the size feature, where no column counts the prompt


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """An answered prompt. `tokens` >= 1."""

    prompt: str
    adapter: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns to read; None: the first known name that the data has."""

    prompt: str | None = None
    length: str | None = None
    adapter: str | None = None
    prompt_tokens: str | None = None


def read(path: Path, columns: Columns) -> list[AnsweredPrompt]:
    """Read all rows. Raises BadData (the missing value and its line), OSError."""
    if not path.name.removesuffix(".gz").endswith((".jsonl", ".csv")):
        raise BadData(f"{path}: expected .jsonl, .jsonl.gz, .csv or .csv.gz")
    try:
        with _open(path) as file:
            rows = list(_rows(_records(path, file), columns, path))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, csv.Error) as error:
        raise BadData(f"{path}: {error}") from error
    if not rows:
        raise BadData(f"{path}: no rows")
    return rows


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _records(path: Path, file: TextIO) -> Iterator[dict[str, Any]]:
    if path.name.removesuffix(".gz").endswith(".csv"):
        yield from csv.DictReader(file)
        return
    for number, line in enumerate(file, 1):
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise BadData(f"{path}, line {number}: {error}") from error
        if not isinstance(record, dict):
            raise BadData(f"{path}, line {number}: not an object")
        yield record


def _rows(records: Iterable[dict[str, Any]], columns: Columns, path: Path) -> Iterator[AnsweredPrompt]:
    found: Columns | None = None
    for number, record in enumerate(records, 1):
        found = found or _find_columns(record, columns, path)
        try:
            yield _row(record, found)
        except (KeyError, TypeError, ValueError) as error:
            raise BadData(f"{path}, row {number}: {type(error).__name__}: {error}") from error


def _find_columns(record: dict[str, Any], columns: Columns, path: Path) -> Columns:
    return Columns(
        _column(record, columns.prompt, PROMPT_COLUMNS, path, "--prompt-column"),
        _column(record, columns.length, LENGTH_COLUMNS, path, "--length-column"),
        columns.adapter or _first(record, ADAPTER_COLUMNS),
        columns.prompt_tokens or _first(record, PROMPT_TOKENS_COLUMNS),
    )


def _column(record: dict[str, Any], requested: str | None, candidates: Sequence[str], path: Path, flag: str) -> str:
    name = requested if requested in record else None if requested else _first(record, candidates)
    if name is None:
        raise BadData(
            f"{path}: no column {requested or ' or '.join(candidates)} among {', '.join(record)}; name it with {flag}"
        )
    return name


def _first(record: dict[str, Any], candidates: Sequence[str]) -> str | None:
    return next((name for name in candidates if name in record), None)


def _row(record: dict[str, Any], columns: Columns) -> AnsweredPrompt:
    assert columns.prompt is not None
    assert columns.length is not None
    prompt = "\n".join(filter(None, (str(record[columns.prompt]), str(record.get("input") or ""))))
    tokens = int(record[columns.length])
    if not 0 <= tokens <= MAX_ANSWER_TOKENS:
        raise ValueError(f"length {tokens} is not within 0 and {MAX_ANSWER_TOKENS}")
    counted = int(record[columns.prompt_tokens]) if columns.prompt_tokens else len(prompt) // CHARS_PER_TOKEN
    adapter = str(record[columns.adapter]) if columns.adapter else ""
    return AnsweredPrompt(prompt, adapter, counted, max(tokens, 1))
