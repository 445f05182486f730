"""`weft up --auth`: a key opens its namespace's adapters and the pools shared with it, and nothing else."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from harness.waiting import eventually
from weft_stage.stack import Stack, quickstart

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(quickstart(), tmp_path_factory.mktemp("w"), "--auth") as made:
        asyncio.run(eventually(lambda: answers(made)))
        yield made


async def answers(stack: Stack) -> bool:
    """The supervisor tells its keys, and the gateway refuses whoever has none."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="nobody", max_retries=0) as client:
        try:
            client.models.list()
        except openai.AuthenticationError:
            return stack.cli("key", "list", check=False).returncode == 0
        except openai.APIError:
            return False
    return False


def texts_of(stack: Stack) -> str:
    """Everything that a stack has written, and what its processes were started with."""
    pids = [component["pid"] for component in stack.components().values()]
    files = [path for path in stack.data_dir.rglob("*") if path.is_file()]
    started = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")]
    return "\n".join(path.read_bytes().decode(errors="replace") for path in (*files, *started))


async def test_keys_open_their_namespace_and_close_when_revoked(locked: Stack) -> None:
    key = locked.create_key("acme")
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:

        async def works() -> bool:
            try:
                answer = client.completions.create(model="acme/upper", prompt="hello", temperature=0)
            except (openai.APIStatusError, openai.APIConnectionError):
                return False
            return answer.choices[0].text == "HELLO"

        await eventually(works)
        assert {m.id for m in client.models.list()} == {"weft-quickstart", "acme/upper", "acme/reverse-words"}
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="globex/initials", prompt="hello")
        assert key not in texts_of(locked), "a key is kept as its hash alone"
        locked.cli("key", "revoke", key.split("-", 2)[1])

        async def refused() -> bool:
            try:
                client.models.list()
            except openai.AuthenticationError:
                return True
            return False

        await eventually(refused)
