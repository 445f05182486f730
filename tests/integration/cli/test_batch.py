"""`weft batch` against a real HTTP server that answers as the gateway does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.loopback import LoopbackServer, Request
from harness.terminal import CTRL_C, Terminal
from weft_cli import batch as command
from weft_cli.main import main

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}
ANSWERS = b'{"custom_id": "a"}\n'
ABSENT = {"status_code": 404, "body": {"error": {"code": "model_not_found", "message": "no m"}}}
LATE = {"custom_id": "late", "error": {"code": "batch_expired", "message": "too late"}}
FAILED = [*({"custom_id": f"bad-{i}", "response": ABSENT} for i in range(5)), LATE]
ERRORS = b"".join(json.dumps(line).encode() + b"\n" for line in FAILED)


class Gateway(LoopbackServer):
    """One batch, a status further with each look; `away`: the number of requests that find nobody."""

    def __init__(self) -> None:
        self.statuses = ["validating", "in_progress", "completed"]
        self.files = {"file-out": ANSWERS}
        self.asked: list[tuple[str, str]] = []
        self.uploads: list[bytes] = []
        self.order: dict[str, Any] = {}
        self.away = 0
        super().__init__(self._answer)

    def _answer(self, request: Request) -> tuple[int, bytes]:
        method, path = request.method, request.path
        self.asked.append((method, path))
        if path.endswith("/content"):
            return 200, self.files[path.split("/")[3]]
        if path == "/v1/files":
            self.uploads.append(request.body)
            return 200, b'{"id": "file-in"}'
        if method == "DELETE":
            return 200, b"{}"
        if path == "/v1/batches" and method == "POST":
            self.order = json.loads(request.body)
        elif path == "/v1/batches/batch_1":
            if self.away:
                self.away -= 1
                return 503, b'{"error": {"message": "starting"}}'
            if len(self.statuses) > 1:
                self.statuses.pop(0)
        elif path.startswith("/v1/batches?"):
            return 200, json.dumps({"data": [self.batch()]}).encode()
        elif path != "/v1/batches/batch_1/cancel":
            return 404, b'{"error": {"message": "There is no such batch."}}'
        return 200, json.dumps(self.batch()).encode()

    def batch(self) -> dict[str, Any]:
        failed = "file-err" in self.files
        return {
            "id": "batch_1",
            "status": self.statuses[0],
            "created_at": 100,
            "metadata": self.order.get("metadata"),
            "request_counts": {"total": 7 if failed else 1, "completed": 1, "failed": 6 if failed else 0},
            "input_file_id": "file-in",
            "output_file_id": "file-out" if "file-out" in self.files else None,
            "error_file_id": "file-err" if failed else None,
            "errors": None,
        }


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    yield server
    server.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    return path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MIN_POLL_S", 0.001)
    monkeypatch.setattr(command, "MAX_POLL_S", 0.001)


def run(gateway: Gateway, file: Path, *words: str) -> int:
    return main(["batch", "run", str(file), "-o", str(file.with_name("out.jsonl")), "--url", gateway.url, *words])


def test_a_file_is_run_and_its_answers_are_fetched(gateway: Gateway, file: Path, capsys: Any) -> None:
    file.with_name("out.errors.jsonl").write_text("of a run before")
    gateway.away = 3  # a gateway that restarts is waited for
    assert run(gateway, file, "--delete-files") == 0
    assert file.with_name("out.jsonl").read_bytes() == ANSWERS
    assert not file.with_name("out.errors.jsonl").exists()
    assert file.read_bytes() in gateway.uploads[0]
    assert (gateway.order["input_file_id"], gateway.order["endpoint"]) == ("file-in", "/v1/completions")
    assert gateway.asked[-2:] == [("DELETE", "/v1/files/file-in"), ("DELETE", "/v1/files/file-out")]
    err = capsys.readouterr().err
    assert "batch_1 in_progress" in err
    assert "1 of 1 lines answered" in err


def test_failed_lines_are_counted_by_kind_with_the_first_of_each(gateway: Gateway, file: Path, capsys: Any) -> None:
    gateway.files["file-err"] = ERRORS
    assert run(gateway, file) == 1
    assert file.with_name("out.errors.jsonl").read_bytes() == ERRORS
    err = capsys.readouterr().err
    assert "6 lines failed" in err
    assert "5 x model_not_found" in err
    assert "bad-2: no m" in err
    assert "bad-3" not in err
    assert "late: too late" in err


@pytest.mark.parametrize(
    ("text", "needle"), [("", "empty"), ("nothing\n", "line 1"), ("[]\n", "url"), ('{"body": {}}\n', "url")]
)
def test_a_file_that_holds_no_requests_is_refused_before_it_is_sent(
    gateway: Gateway, file: Path, capsys: Any, text: str, needle: str
) -> None:
    file.write_text(text)
    assert run(gateway, file) == 2
    assert needle in capsys.readouterr().err
    assert not gateway.asked


def test_wrong_paths_and_unknown_batches_are_named(gateway: Gateway, file: Path, capsys: Any) -> None:
    assert run(gateway, file.with_name("absent")) == 2
    assert main(["batch", "run", str(file), "-o", "/nowhere/out", "--url", gateway.url]) == 2
    assert "no folder /nowhere" in capsys.readouterr().err
    assert not gateway.asked
    assert main(["batch", "get", "batch_x", "--url", gateway.url]) == 1
    assert "weft batch list" in capsys.readouterr().err


def test_list_get_and_cancel(gateway: Gateway, capsys: Any) -> None:
    shown = ((["list"], "batch_1"), (["get", "batch_1", "-o", "json"], '"id"'), (["cancel", "batch_1"], "batch_1"))
    for words, needle in shown:
        assert main(["batch", *words, "--url", gateway.url]) == 0
        assert needle in capsys.readouterr().out


def test_ctrl_c_leaves_the_batch_running_and_says_how_to_take_it_up(gateway: Gateway, file: Path) -> None:
    gateway.statuses = ["in_progress"]
    words = ("batch", "run", str(file), "-o", str(file.with_name("out.jsonl")), "--url", gateway.url)
    with Terminal(*words) as terminal:
        terminal.until("in_progress")
        terminal.press(CTRL_C, until="weft batch wait batch_1")
        assert terminal.exit_code() == command.INTERRUPTED
    assert not any(path.endswith("cancel") for _, path in gateway.asked)
