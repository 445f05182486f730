"""`weft serve`, as somebody with a model and a few adapters uses it."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import OpenAI

from harness.fake_hub import FakeHub
from harness.ports import free_port
from harness.processes import started
from harness.quickstart import QUICKSTART, sure_cases
from harness.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

MODEL, ADAPTERS = QUICKSTART / "model", QUICKSTART / "adapters"
ENDS = "Ctrl-C stops everything"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serving(state: Path, *words: object, **variables: str) -> Generator[OpenAI]:
    """A stack that is ready; a Ctrl-C ends it in order."""
    port = free_port()
    command = [sys.executable, "-m", "weft_cli", "serve", *map(str, words), "--port", str(port)]
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "NO_COLOR": "1", **variables}
    with started(*command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        said = list[str]()
        for line in process.stdout:
            said.append(line)
            if ENDS in line:
                break
        assert ENDS in said[-1], "".join(said)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0


def models_of(client: OpenAI) -> set[str]:
    return {model.id for model in client.models.list()}


def test_a_repository_is_served_from_the_cache_and_another_command_line_serves_something_else(tmp_path: Path) -> None:
    (case,) = sure_cases(("acme/upper",), 1, seed=0)
    with FakeHub() as hub:
        hub.repo("acme/tiny", {**files_of(MODEL), "pytorch_model.bin": b"pickle", "modeling.py": b"code"})
        hub.repo("acme/lora", files_of(ADAPTERS / "upper"))
        cache = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        with serving(tmp_path, "acme/tiny", "--adapter", "loud=acme/lora", **cache) as client:
            assert models_of(client) == {"acme/tiny", "loud"}
            messages = [{"role": "user", "content": case.prompt}]
            answer = client.chat.completions.create(model="loud", messages=messages, temperature=0)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == case.expect
            listed = subprocess.run(
                [sys.executable, "-m", "weft_cli", "get", "lora"],
                env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
            )  # fmt: skip
            row = listed.stdout.splitlines()[1].split()  # no flag says where that stack is
            assert row[:5] == ["loud", "tiny", "loud", "True", "Published"]
        assert not {"pytorch_model.bin", "modeling.py"} & {path.name for path in (tmp_path / "hf").rglob("*")}
    (beside := tmp_path / "adapters").mkdir()
    for path in ADAPTERS.iterdir():
        (beside / path.name).symlink_to(path)
    (beside / "my adapter").symlink_to(ADAPTERS / "upper")
    with serving(tmp_path, MODEL, "--adapters", beside, "--name", "tiny") as client:
        assert models_of(client) == {"tiny", "my-adapter", *(path.name for path in ADAPTERS.iterdir())}
        assert client.completions.create(model="my-adapter", prompt="a", max_tokens=1).choices


def test_a_base_that_cannot_be_served_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    (base := tmp_path / "base").mkdir()
    for name, content in files_of(MODEL).items():
        if name != "tokenizer.json":
            (base / name).write_bytes(content)
    command = [sys.executable, "-m", "weft_cli", "serve", base, "--adapters", ADAPTERS, "--port", str(free_port())]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("weft: ServingPool default/base: MissingFile: tokenizer.json")
