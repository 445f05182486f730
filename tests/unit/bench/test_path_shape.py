"""The raw reader of server-sent events, and what is given to the stack and to the engine alone."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml

from weft.api.loraadapter import LoRAAdapter
from weft.api.servingpool import ServingPool
from weft_bench import sse
from weft_bench.cpu_engine import Sizes, pages_of
from weft_bench.cpu_models import adapter, base_model
from weft_bench.errors import RequestFailed
from weft_bench.path_shape import ADAPTERS, tokenizer, work, write_manifests
from weft_bench.roofline import Shape

SMALLEST = Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices": []}\n\n', b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 17}}\n\n']
DONE = b"data: [DONE]\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(answer: bytes, asked: list[Any]) -> AsyncGenerator[int]:
    """A server on a port of its own that gives every request this answer, a byte at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            asked.append(json.loads(await reader.readexactly(length)))
            for i in range(len(answer)):
                writer.write(answer[i : i + 1])
                await writer.drain()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(quietly, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_streams_are_read_to_their_end_over_as_many_connections() -> None:
    asked: list[Any] = []
    async with answering(HEAD + chunked(*EVENTS, DONE), asked) as port:
        done = await sse.run("127.0.0.1", port, [{"prompt": [i]} for i in range(5)], streams=2)
    assert [answer.tokens for answer in done] == [17] * 5
    assert all(answer.start < answer.first <= answer.end for answer in done)
    assert sorted(body["prompt"][0] for body in asked) == list(range(5))
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in asked)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n", "429"),
        (b"HTTP/1.1 503 Unavailable\r\nContent-Length: 14\r\n\r\nthe pool waits", "the pool waits"),
        (HEAD + chunked(EVENTS[0], b'data: {"error": {"message": "the runner is gone"}}\n\n'), "runner is gone"),
        (HEAD + chunked(EVENTS[0], DONE), "did not end well"),
    ],
)
async def test_an_answer_that_is_not_a_whole_stream_is_told(answer: bytes, said: str) -> None:
    async with answering(answer, []) as port:
        with pytest.raises(ExceptionGroup) as caught:
            await sse.run("127.0.0.1", port, [{}], streams=1)
    assert said in str(caught.value.exceptions[0])
    assert isinstance(caught.value.exceptions[0], RequestFailed)


def test_requests_take_turns_over_the_base_and_every_adapter() -> None:
    given = work(random.Random(0), SMALLEST, streams=9)
    assert set(given.numbers) == {None, *range(ADAPTERS)}
    assert given.numbers[:3] == (None, 0, 1)
    assert given == work(random.Random(0), SMALLEST, streams=9)


def test_tokens_are_numbered_words() -> None:
    made = tokenizers.Tokenizer.from_str(tokenizer(64))
    assert made.get_vocab_size() == 64
    assert made.encode("w17 w3 nonsense").ids == [17, 3, 0]
    assert made.id_to_token(63) == "w63"


def test_manifests_are_valid_and_say_what_the_engine_alone_is_given(tmp_path: Path) -> None:
    base = base_model(tmp_path / "models", "smallest", SMALLEST)
    adapters = [adapter(tmp_path / "models", "smallest", SMALLEST, number, 4) for number in range(2)]
    sizes = Sizes(rows=8, slots=3, context_tokens=64, batch_tokens=256, prefills=1, token_time_ms=50)
    folder = write_manifests(tmp_path / "manifests", base, adapters, SMALLEST, sizes)
    pool, *others = yaml.safe_load_all((folder / "bench.yaml").read_text())
    spec = ServingPool.model_validate(pool).spec
    assert (spec.kv_cache.pages, spec.scheduler.max_sequences) == (pages_of(sizes), 8)
    assert spec.slo is not None
    assert spec.slo.token_time_ms == 50
    assert spec.lora.max_adapters == 3
    assert [LoRAAdapter.model_validate(other).metadata.name for other in others] == ["r4-0", "r4-1"]
    assert {path.name for path in (folder / "model").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    assert (folder / "r4-1" / "adapter_model.safetensors").read_bytes() == (
        adapters[1] / "adapter_model.safetensors"
    ).read_bytes()
