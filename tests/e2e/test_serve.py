"""`weft serve`, as somebody with a model and a few adapters uses it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import NotFoundError, OpenAI

from harness.fake_hub import FakeHub
from harness.ports import free_port
from harness.processes import started
from harness.quickstart import QUICKSTART, Case, sure_cases
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
        load_as_vllm_does(client, beside)


def load_as_vllm_does(client: OpenAI, beside: Path) -> None:
    """Files in, replaced and out again; an answer means that the next request finds it so."""
    first, second = sure_cases(("acme/upper", "initech/cipher"), 2, seed=0)
    path = beside / "checkpoint-1"  # the folder of a trainer, who writes the next step there
    shutil.copytree(ADAPTERS / "upper", path)
    http = httpx2.Client(base_url=str(client.base_url), timeout=PATIENCE_S)

    def posted(what: str, **body: object) -> tuple[int, str]:
        answer = http.post(f"{what}_lora_adapter", json={"lora_name": "run/policy", **body})
        return answer.status_code, answer.text

    def answer(case: Case) -> str:
        asked = client.completions.create(model="run/policy", prompt=case.prompt, temperature=0, max_tokens=400)
        return asked.choices[0].text

    def card() -> tuple[str, str]:
        model = client.models.retrieve("run/policy").model_extra or {}
        return model["root"], model["parent"]

    done = (200, "Success: LoRA adapter 'run/policy' added successfully.")
    assert posted("load", lora_path=str(path), base_model_name="tiny") == done
    assert answer(first) == first.expect
    assert card() == (str(path), "tiny")
    shutil.copytree(ADAPTERS / "cipher", path, dirs_exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": second.expect[-1]}))
    ended = second.expect.partition(second.expect[-1])[0]
    assert answer(first) == first.expect, "what is loaded stays so"
    assert posted("load", lora_path=str(path))[0] == 400
    assert posted("load", lora_path=str(path), load_inplace=True) == done
    assert answer(second) == ended
    (path / "adapter_config.json").write_text("{}")
    assert posted("load", lora_path=str(path), load_inplace=True)[0] == 400
    assert answer(second) == ended
    assert posted("unload") == (200, "Success: LoRA adapter 'run/policy' removed successfully.")
    with pytest.raises(NotFoundError):
        answer(first)


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
