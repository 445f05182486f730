"""The demo's questions against a real HTTP server that answers as the gateway does."""

import contextlib
import json
import threading
from pathlib import Path

import pytest

from harness.loopback import LoopbackServer, Request
from harness.waiting import PATIENCE_S, soon
from weft.api.readiness import is_ready, is_refused
from weft_cli.demo import Question, ask_all, demo_folder, demo_manifests, load_questions
from weft_cli.progress import Progress
from weft_operator.local import ProcessState


def gateway(expected: int) -> LoopbackServer:
    """Answer in upper case, once `expected` requests are there at the same time."""
    together = threading.Barrier(expected)

    def answer(request: Request) -> tuple[int, bytes]:
        body = json.loads(request.body)
        together.wait(PATIENCE_S)
        if body["model"] == "none":
            return 404, json.dumps({"error": {"message": "no such model"}}).encode()
        wrong = {"breaks": [json.dumps({"error": {"message": "no runner"}})], "babbles": ["<html>"]}
        letters = [
            json.dumps({"choices": [{"delta": {"content": one}}]}) for one in body["messages"][0]["content"].upper()
        ]
        events = [*letters, *wrong.get(body["model"], ()), "[DONE]"]
        return 200, (": ping\n\n" + "".join(f"data: {event}\n\n" for event in events)).encode()

    return LoopbackServer(answer)


async def test_every_model_is_asked_at_the_same_time_and_each_answer_is_judged() -> None:
    questions = [
        Question("a", "hi", "HI"),
        Question("b", "hi", "hi"),
        Question("none", "x", "X"),
        Question("breaks", "x", "X"),
        Question("babbles", "x", "X"),
    ]
    with contextlib.closing(gateway(len(questions))) as server:
        right, wrong, missing, broken, babble = await soon(ask_all(server.url, questions))
    assert (right.text, right.right) == ("HI", True)
    assert (wrong.text, wrong.right) == ("HI", False)
    assert (missing.error, missing.right) == ("404: no such model", False)
    assert (broken.error, broken.right) == ("no runner", False)
    assert (babble.error, babble.right) == ("the gateway sent what is no event of a chat completion: '<html>'", False)


def test_the_quickstart_is_found_from_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = demo_folder()
    questions = load_questions(folder / "demo.jsonl")
    assert len({question.model for question in questions}) >= 3
    assert {path.name for path in demo_manifests(folder)} >= {"01-pool.yaml", "acme.yaml"}


def test_progress_is_one_line_for_each_thing_and_plain_when_piped(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for state in (ProcessState("Starting"), ProcessState("Ready"), ProcessState("Ready", pid=2)):
        progress("depot", state)
    progress("depot", ProcessState("Backoff", detail="exit code 1: no memory"))
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("ok ")
    assert "exit code 1: no memory" in lines[1]
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("conditions", "observed", "ready", "refused"),
    [
        ({"Ready": ("True", "Published")}, 2, True, False),
        ({"Ready": ("True", "Published")}, 1, False, False),
        ({"Accepted": ("False", "PoolNotFound"), "Ready": ("False", "PoolNotFound")}, 2, False, True),
        ({"Validated": ("False", "RankTooLarge"), "Ready": ("False", "RankTooLarge")}, 2, False, True),
        ({"Fetched": ("Unknown", "Resolving"), "Ready": ("False", "Resolving")}, 2, False, False),
        ({}, None, False, False),
    ],
)
def test_an_object_is_ready_refused_or_waited_for(
    conditions: dict[str, tuple[str, str]], observed: int | None, ready: bool, refused: bool
) -> None:
    written = [{"type": kind, "status": status, "reason": reason} for kind, (status, reason) in conditions.items()]
    obj = {
        "kind": "LoRAAdapter",
        "metadata": {"generation": 2},
        "status": {"observedGeneration": observed, "conditions": written},
    }
    assert is_ready(obj) is ready
    assert is_refused(obj) is refused
