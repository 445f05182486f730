"""Records of output and error files, in OpenAI's form. One JSON object a line."""

import json
from typing import Any

import orjson

from weft.domain.batch import LineResult
from weft.store.batches import StoredResult
from weft_batch.core.batches import LineFailed
from weft_batch.core.input_lines import BadLine

_ONE_LINE = bytes.maketrans(b"\n\r", b"  ")  # no text of JSON holds either
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")


def answer_record(result: LineResult, custom_id: str | None) -> StoredResult:
    """Make the record of a gateway's answer. An answer that is no JSON is an error of the line, never a damaged
    file."""
    try:
        orjson.loads(result.body)  # strict: no NaN, no half of a surrogate pair
    except ValueError:
        failed = LineFailed(result.batch_id, result.line, "invalid_answer", "the gateway's answer is not JSON")
        return failure_record(failed, custom_id)
    body = result.body.translate(_ONE_LINE).decode()
    response = f'{{"status_code": {result.status}, "request_id": {_text(result.request_id)}, "body": {body}}}'
    return StoredResult(
        result.batch_id,
        result.line,
        200 <= result.status < 300,
        _record(result.batch_id, result.line, custom_id, response, "null"),
        result.prompt_tokens,
        result.completion_tokens,
    )


def failure_record(failed: LineFailed, custom_id: str | None) -> StoredResult:
    """Make the record of a line that has no answer."""
    error = {"code": failed.code, "message": failed.message}
    record = _record(failed.batch_id, failed.line, custom_id, "null", _text(error))
    return StoredResult(failed.batch_id, failed.line, False, record)


def bad_line_record(batch_id: str, line: int, bad: BadLine) -> StoredResult:
    """Make the record of an input line that cannot run. The message names it, whether it has a custom_id or not."""
    error: dict[str, Any] = {"code": bad.code, "message": f"line {line}: {bad.message}", "line": line}
    if bad.param:
        error["param"] = bad.param
    return StoredResult(batch_id, line, False, _record(batch_id, line, bad.custom_id, "null", _text(error)))


def _record(batch_id: str, line: int, custom_id: str | None, response: str, error: str) -> bytes:
    name = _text(f"batch_req_{batch_id.removeprefix('batch_')}_{line}")
    return f'{{"id": {name}, "custom_id": {_text(custom_id)}, "response": {response}, "error": {error}}}'.encode()


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
