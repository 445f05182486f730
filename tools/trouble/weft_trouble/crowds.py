"""`python -m weft_trouble.crowds KIND COUNT HOST:PORT [KEY]`: many clients at one gateway that are no good ones.

A process of its own, so that it shares no interpreter with who measures. It writes a line of JSON once all clients are
there, and a last one, with what became of them, when its standard input ends. *replaced* clients were closed by the
gateway, and came back.
"""

import asyncio
import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from weft.process import raise_descriptor_limit, split_address
from weft_stage.sse import WORDS

IDLE, SLOW_HEADS, SLOW_BODIES, READERS, FLOOD = "idle", "slow heads", "slow bodies", "stopped readers", "flood"
SMALL, BODIES, PROMPTS = BURSTS = "small requests", "large bodies", "long prompts"
SCRAPES, CHATS, BLANKS, UPLOADS = ATTACKS = "scrapes", "stored conversations", "blank lines", "dripping uploads"
KINDS = (IDLE, SLOW_HEADS, SLOW_BODIES, READERS, FLOOD, *BURSTS, *ATTACKS)
MODEL = "weft-quickstart"
AT_ONCE = 100  # connections that are being made
DRIP_S, FLOOD_S = 1.0, 0.2  # between two bytes; between two requests of a client that floods
SMALL_WINDOW, SMALL_SEGMENT = 4096, 536  # bytes: of an answer that is not read, the kernel keeps little
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
STORED_RESPONSES, STORED_VALUES = 8, 10_000  # of a conversation; of each response: short texts that no model reads
BLANK_BYTES = 20 << 20
UPLOAD_BYTES = 1 << 30  # that never come
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _request(max_tokens: int, key: str, **fields: object) -> bytes:
    body = {"prompt": " ".join(WORDS), "max_tokens": max_tokens, "ignore_eos": True, **fields}
    return _posted("/v1/completions", key, body)


def _posted(path: str, key: str, fields: Mapping[str, object]) -> bytes:
    content = json.dumps({"model": MODEL, **fields}).encode()
    return _head("POST", path, key, "application/json", len(content)) + content


def _head(method: str, path: str, key: str, content_type: str, n_bytes: int) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\nauthorization: Bearer {key}"
    return f"{head}\r\ncontent-length: {n_bytes}\r\n\r\n".encode()


def form_of(fields: Mapping[str, str], filename: str, content: bytes) -> bytes:
    """Return a form with these fields and a file, whose boundary is `b`."""
    parts = [f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    parts.append(f'--b\r\ncontent-disposition: form-data; name="file"; filename="{filename}"\r\n\r\n')
    return "".join(parts).encode() + content + b"\r\n--b--\r\n"


def _of_burst(kind: str, key: str) -> bytes:
    """Return a request that costs the gateway alone: it is refused at its end for its length, or is `/tokenize`."""
    if kind == SMALL:
        return _request(1024, key)
    if kind == PROMPTS:
        return _posted("/tokenize", key, {"prompt": " ".join(WORDS * 2_200)})
    said = " ".join(WORDS * 3)
    messages = [{"role": ("user", "assistant")[number % 2], "content": said} for number in range(4_000)]
    return _posted("/v1/chat/completions", key, {"messages": messages})


class Crowd:
    """Clients of one kind; what they saw, counted."""

    def __init__(self, kind: str, host: str, port: int, key: str) -> None:
        self._host, self._port, self._key = host, port, key
        self._opening = asyncio.Semaphore(AT_ONCE)
        self._act: Callable[[Ends, asyncio.Event], Awaitable[None]] = {
            IDLE: self._idle, SLOW_HEADS: self._slow_head, SLOW_BODIES: self._slow_body, READERS: self._reader,
            FLOOD: self._flood, **dict.fromkeys(BURSTS, self._flood), SCRAPES: self._flood, CHATS: self._chat,
            BLANKS: self._blank, UPLOADS: self._upload,
        }[kind]  # fmt: skip
        self._sent, self._pause_s = (_of_burst(kind, key), 0.0) if kind in BURSTS else (_request(64, key), FLOOD_S)
        if kind == SCRAPES:
            self._sent, self._pause_s = METRICS, 0.0
        self._small = kind == READERS
        self.seen = Counter[str]()

    async def client(self, there: asyncio.Event) -> None:
        """One, for ever; `there` once it does what its kind does."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with self._opening:
                    ends = await self._connected()
                try:
                    await self._act(ends, there)
                finally:
                    ends[1].transport.abort()
            self.seen["replaced"] += 1
            await asyncio.sleep(FLOOD_S)

    async def _connected(self) -> Ends:
        sock = socket.socket()
        sock.setblocking(False)
        if self._small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_WINDOW)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
        return await asyncio.open_connection(sock=sock, limit=SMALL_WINDOW)

    async def _idle(self, ends: Ends, there: asyncio.Event) -> None:
        ends[1].write(HEALTH)
        await ends[0].readuntil(b"\r\n\r\n")
        there.set()
        while await ends[0].read(SMALL_WINDOW):
            pass

    async def _slow_head(self, ends: Ends, there: asyncio.Event) -> None:
        await self._drip(ends, there, b"GET /healthz HTTP/1.1\r\nhost: ", b"x")

    async def _slow_body(self, ends: Ends, there: asyncio.Event) -> None:
        request = _request(1, self._key)
        await self._drip(ends, there, request[:-200], b" ")

    async def _drip(self, ends: Ends, there: asyncio.Event, begin: bytes, drop: bytes) -> None:
        """A byte a second, until the gateway has had enough."""
        ends[1].write(begin)
        there.set()
        answer = asyncio.ensure_future(ends[0].read())
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=DRIP_S)
                ends[1].write(drop)
        finally:
            answer.cancel()
        self.seen[f"status {answer.result()[9:12].decode(errors='replace')}"] += 1

    async def _reader(self, ends: Ends, there: asyncio.Event) -> None:
        """Some of a long answer is read, no more after that."""
        ends[1].write(_request(900, self._key, stream=True, logprobs=5))
        await ends[0].readuntil(b"data: ")
        ends[1].transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        there.set()
        await asyncio.Event().wait()

    async def _flood(self, ends: Ends, there: asyncio.Event) -> None:
        """A request and the next one, whatever is answered."""
        there.set()
        while True:
            await self._answer(ends, self._sent)
            await asyncio.sleep(self._pause_s)

    async def _answer(self, ends: Ends, sent: bytes) -> bytes:
        """Send a request, count the status of its answer, and return the answer's body."""
        ends[1].write(sent)
        head = await ends[0].readuntil(b"\r\n\r\n")
        self.seen[f"status {head[9:12].decode(errors='replace')}"] += 1
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return await ends[0].readexactly(int(length.partition(b":")[2]))

    async def _chat(self, ends: Ends, there: asyncio.Event) -> None:
        """Store a long conversation, then continue it with a short request, again and again."""
        texts = [{"type": "summary_text", "text": "x"}] * (STORED_VALUES // 5)
        items = [*({"type": "reasoning", "summary": texts} for _ in range(5)), {"role": "user", "content": "a"}]
        fields: dict[str, object] = {"max_output_tokens": 1}
        for _ in range(STORED_RESPONSES):
            body = await self._answer(ends, _posted("/v1/responses", self._key, {**fields, "input": items}))
            if stored := json.loads(body).get("id"):
                fields["previous_response_id"] = stored
        there.set()
        while True:
            await self._answer(ends, _posted("/v1/responses", self._key, {**fields, "input": "a"}))

    async def _blank(self, ends: Ends, there: asyncio.Event) -> None:
        """Upload an input of empty lines, and start batches with it."""
        form = form_of({"purpose": "batch"}, "lines.jsonl", b"\n" * BLANK_BYTES)
        upload = _head("POST", "/v1/files", self._key, "multipart/form-data; boundary=b", len(form)) + form
        file_id = json.loads(await self._answer(ends, upload)).get("id", "")
        order = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        content = json.dumps(order).encode()
        request = _head("POST", "/v1/batches", self._key, "application/json", len(content)) + content
        while True:
            await self._answer(ends, request)
            there.set()
            await asyncio.sleep(FLOOD_S)

    async def _upload(self, ends: Ends, there: asyncio.Event) -> None:
        """Send an adapter that does not come to an end."""
        head = _head("PUT", "/v1/adapters", self._key, "multipart/form-data; boundary=b", UPLOAD_BYTES)
        begin = form_of({}, "adapter_model.safetensors", b"").removesuffix(b"\r\n--b--\r\n")
        await self._drip(ends, there, head + begin, b"x")


async def _main(kind: str, count: int, address: str, key: str) -> None:
    raise_descriptor_limit()
    crowd = Crowd(kind, *split_address(address), key)
    there = [asyncio.Event() for _ in range(count)]
    clients = [asyncio.create_task(crowd.client(event)) for event in there]
    for event in there:
        await event.wait()
    print(json.dumps({"there": count}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in clients:
        task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    print(json.dumps(crowd.seen), flush=True)


if __name__ == "__main__":
    given_kind, given_count, given_address, *rest = sys.argv[1:]
    asyncio.run(_main(given_kind, int(given_count), given_address, *(rest or [""])))
