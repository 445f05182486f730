"""`weft batch`: upload a file of requests, follow the batch, fetch answers and errors.

The batch belongs to the gateway from its creation: whatever ends this command leaves it running, and `weft batch wait`
takes it up again. Only what is whole gets the name of the output.
"""

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from weft_cli.errors import BadInput, CommandError
from weft_cli.gateway import GatewayGone, gateway_client, link_errors, refusal_error
from weft_cli.output import age, dump, note, say, table

ENDED = ("completed", "failed", "expired", "cancelled")
MIN_POLL_S, MAX_POLL_S = 0.2, 2.0
AWAY_S = 60.0  # for a gateway that restarts
INTERRUPTED = 130
EXAMPLES = 3  # of each kind of error
MAX_LISTED = 100  # by the API at a time
MAX_LINE_CHARS = 8 << 20
LIST_HINT = "`weft batch list` shows your batches"
Batch = dict[str, Any]


class BatchApiClient:
    """The batches of one caller at a gateway."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._http = url, gateway_client(url, key)

    def __enter__(self) -> "BatchApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def run(self, file: Path, output: Path, *, delete_files: bool) -> int:
        """Take a file to its answers. Returns the exit code."""
        _check_output(output)
        endpoint = _endpoint_of(file)
        uploaded = self._upload(file)
        order = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = self._ask("POST", "/v1/batches", json=order | {"metadata": {"file": file.name[:512]}})
        note(f"{batch['id']} runs at {self._url}")
        return self.wait(batch["id"], output, delete_files=delete_files)

    def wait(self, batch_id: str, output: Path, *, delete_files: bool) -> int:
        """Wait until the batch has ended and its answers are here. Returns the exit code."""
        _check_output(output)
        try:
            batch = self._follow(batch_id)
            errors = output.with_suffix(f".errors{output.suffix}")
            self._fetch(batch["output_file_id"], output)
            self._fetch(batch["error_file_id"], errors)
        except KeyboardInterrupt:
            note(f"the batch goes on; its answers: `weft batch wait {batch_id} -o {output}`")
            return INTERRUPTED
        except GatewayGone as error:
            hint = f"the batch goes on once it is back: `weft batch wait {batch_id} -o {output}`"
            raise CommandError(error.message, hint) from error
        if delete_files:
            for name in ("input_file_id", "output_file_id", "error_file_id"):
                if file_id := batch[name]:
                    self._ask("DELETE", f"/v1/files/{file_id}")
        return _summary(batch, output, errors)

    def list(self) -> None:
        batches = self._ask("GET", "/v1/batches", params={"limit": MAX_LISTED})["data"]
        now = time.time()
        rows = [_row(batch, now) for batch in batches]
        say("\n".join(table(("ID", "STATUS", "LINES", "ANSWERED", "FAILED", "FILE", "AGE"), rows)))

    def show(self, batch_id: str, form: str) -> None:
        say(dump(self._ask("GET", f"/v1/batches/{batch_id}"), form))

    def cancel(self, batch_id: str) -> None:
        batch = self._ask("POST", f"/v1/batches/{batch_id}/cancel")
        say(f"{batch_id} {batch['status']}")

    # ---------------------------------------------------------------- the gateway

    def _upload(self, file: Path) -> dict[str, Any]:
        with _opened(file) as data:
            return self._ask("POST", "/v1/files", files={"file": (file.name, data)}, data={"purpose": "batch"})

    def _follow(self, batch_id: str) -> Batch:
        """Show how far the batch is until it has ended. Raises CommandError."""
        pause_s, last_answer = MIN_POLL_S, time.monotonic()
        with _progress() as show:
            while True:
                try:
                    batch = self._ask("GET", f"/v1/batches/{batch_id}")
                    last_answer = time.monotonic()
                    show(batch)
                    if batch["status"] in ENDED:
                        return batch
                except GatewayGone:
                    if time.monotonic() - last_answer > AWAY_S:
                        raise
                time.sleep(pause_s)
                pause_s = min(MAX_POLL_S, pause_s * 1.2)

    def _fetch(self, file_id: str | None, path: Path) -> None:
        """Write a file of the batch, whole or not at all, and remove what a run before has left there."""
        if file_id is None:
            path.unlink(missing_ok=True)
            return
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as out:
                for chunk in self._content(file_id):
                    out.write(chunk)
            part.replace(path)
        except OSError as error:
            raise CommandError(
                f"cannot write {path}: {error.strerror}", "`weft batch wait` fetches it again"
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def _content(self, file_id: str) -> Iterator[bytes]:
        with link_errors(self._url), self._http.stream("GET", f"/v1/files/{file_id}/content") as response:
            if not response.is_success:
                raise refusal_error(response.read(), response.status_code, LIST_HINT)
            yield from response.iter_bytes()

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Ask the gateway. Raises CommandError."""
        with link_errors(self._url):
            response = self._http.request(method, path, **options)
        if not response.is_success:
            raise refusal_error(response.content, response.status_code, LIST_HINT)
        try:
            return response.json()
        except ValueError as error:
            raise CommandError(f"{self._url} answers what is no JSON: is it a gateway of Weft?") from error


def _row(batch: Batch, now: float) -> tuple[str, ...]:
    counts = batch["request_counts"]
    created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(batch["created_at"]))
    file = (batch["metadata"] or {}).get("file", batch["input_file_id"])
    numbers = (str(counts[name]) for name in ("total", "completed", "failed"))
    return (batch["id"], batch["status"], *numbers, file, age(created, now))


# -------------------------------------------------------------------- the file


@contextlib.contextmanager
def _opened(file: Path) -> Generator[Any]:
    try:
        data = file.open("rb")
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}", "name a file of JSON lines") from error
    with data:
        yield data


def _endpoint_of(file: Path) -> str:
    """The endpoint by the `url` of the first line. The gateway checks every line. Raises BadInput."""
    with _opened(file) as data:
        first = data.readline(MAX_LINE_CHARS)
    if not first.strip():
        raise BadInput(f"{file}: the first line is empty", "a line is one request; `weft batch run --help` shows one")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        hint = "a line is a JSON object with custom_id, method, url and body; `weft batch run --help` shows one"
        raise BadInput(f"{file}, line 1: there is no `url` in it ({type(error).__name__})", hint) from error
    return str(url)


def _check_output(output: Path) -> None:
    """Check that the output can be written, before an hour's work and not after it. Raises BadInput."""
    if output.is_dir() or not output.parent.is_dir():
        message = "is a folder" if output.is_dir() else f"cannot be written: there is no folder {output.parent}"
        raise BadInput(f"--output: {output} {message}", "name a file in a folder that is there")


# -------------------------------------------------------------------- what a person sees


@contextlib.contextmanager
def _progress() -> Generator[Callable[[Batch], None]]:
    """Show progress: a bar on a terminal; a line for each new status elsewhere."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(batch: Batch) -> None:
            if batch["status"] not in seen:
                seen.add(batch["status"])
                note(f"{batch['id']} {batch['status']}: {_done(batch)}")

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("uploaded", total=None, failed="")

        def move(batch: Batch) -> None:
            counts = batch["request_counts"]
            failed = f"{counts['failed']} failed" if counts["failed"] else ""
            done = counts["completed"] + counts["failed"]
            bar.update(task, description=batch["status"], total=counts["total"] or None, completed=done, failed=failed)

        yield move


def _done(batch: Batch) -> str:
    counts = batch["request_counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['completed']} of {counts['total']} lines answered{failed}"


def _summary(batch: Batch, output: Path, errors: Path) -> int:
    """Print what has come of the batch. Returns the exit code."""
    for error in (batch["errors"] or {}).get("data") or ():
        location = f"line {error['line']}: " if error["line"] else ""
        note(f"weft: {location}{error['message']} ({error['code']})")
    if batch["output_file_id"]:
        note(f"{_done(batch)}: {output}")
    if batch["error_file_id"]:
        _explain(errors)
    fine = batch["status"] == "completed" and not batch["request_counts"]["failed"]
    if batch["status"] != "completed":
        note(f"weft: the batch {batch['status']}; {_done(batch)}")
    return 0 if fine else 1


def _explain(errors: Path) -> None:
    """Print failed lines by kind, with the first of each."""
    counts, examples = Counter[str](), dict[str, list[str]]()
    with errors.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            custom_id, code, message = _error_of(json.loads(line))
            counts[code] += 1
            if len(shown := examples.setdefault(code, [])) < EXAMPLES:
                shown.append(f"{custom_id}: {message}")
    note(f"weft: {counts.total()} lines failed: {errors}")
    for code, count in counts.most_common():
        note(f"      {count} x {code}")
        for example in examples[code]:
            note(f"          {example}")


def _error_of(line: dict[str, Any]) -> tuple[str, str, str]:
    """Read custom_id, code and message of a failed line, from the line or from its response."""
    response = line.get("response") or {}
    error = line.get("error") or (response.get("body") or {}).get("error") or {}
    code = error.get("code") or f"status {response.get('status_code')}"
    return str(line.get("custom_id")), str(code), str(error.get("message"))
