"""The targets by name, each with its examples."""

import io
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from botocore.awsrequest import AWSResponse
from botocore.session import Session
from google.protobuf.message import DecodeError

from fuzz.building import Choices, Words, encoded
from fuzz.peers import decoded, frames, gateway_core, kv_frames, runner_core, scheduler_core, supervisor_core
from harness.gateway_http import ReadRequest, read_requests
from harness.manifests import load_text
from weft.api.manifests import ManifestError
from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.errors import Unavailable
from weft.artifacts.verify import verdict_of
from weft.chat_template import Chat, ChatTemplate, TemplateFault, TemplateRefused
from weft.domain.model.adapter import check_adapter
from weft.domain.model.config import parse_model_config
from weft.domain.model.errors import Refused
from weft.domain.model.safetensors import read_header
from weft.domain.model.tensors import check_model_tensors
from weft.s3 import s3_client
from weft.wire.errors import PeerError
from weft_batch.core import InputReader, read_line
from weft_depot.sources import BucketSnapshot, Place, RetryPolicy, parse_manifest, parse_reference, parse_revision
from weft_gateway.core import ANY_NAMESPACE
from weft_gateway.errors import ApiError
from weft_gateway.openai import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Call,
    DetokenizeRequest,
    MessagesEndpoint,
    RerankRequest,
    ResponsesEndpoint,
    ScoreRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    parse,
    select_form,
)
from weft_gateway.shell import ModelTokenizer, NotEncodable, drawn_ids
from weft_operator.local import Invalid, admit
from weft_runner.shell.kv_connection import KvConnectionClosed

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
CONTEXT_TOKENS = 256
Run = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    """`run` raises nothing but findings; what it returns is what was read, or the refusal. `examples`: valid inputs."""

    run: Run
    examples: Sequence[bytes]


def _read(*parts: str) -> bytes:
    return QUICKSTART.joinpath(*parts).read_bytes()


# ------------------------------------------------------------------------------------------------ request bodies


TOKENIZER_FILES = {
    path.name: path.read_bytes()
    for path in (QUICKSTART / "model").iterdir()
    if path.suffix in (".json", ".jinja") and path.name != "config.json"
}
TOKENIZER = ModelTokenizer(TOKENIZER_FILES)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS: Sequence[Any] = (
    {
        "model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True, "top_logprobs": 3, "seed": 1, "n": 2, "logit_bias": {"5": 1.5}, "presence_penalty": 0.1,
    },
    {
        "model": "m", "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"enable_thinking": True}, "add_generation_prompt": False,
        "continue_final_message": True, "documents": [{"title": "t"}], "reasoning_effort": "low",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "u"}]},
    },
)  # fmt: skip
COMPLETED: Sequence[Any] = (
    {
        "model": "m", "prompt": ["a", "b"], "max_tokens": 5, "echo": True, "logprobs": 2, "best_of": 3, "n": 2,
        "suffix": "z", "stop": "x", "user": "u", "top_k": 4, "min_p": 0.1, "ignore_eos": True, "prompt_logprobs": 1,
        "repetition_penalty": 1.1, "structured_outputs": {"regex": "[a-c]+"}, "stop_token_ids": [3],
    },
    {"model": "m", "prompt": [[1, 2, 3]], "structured_outputs": {"choice": ["a", "b"]}, "min_tokens": 2},
)  # fmt: skip
EMBEDDED: Sequence[Any] = (
    {"model": "m", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 8, "truncate_prompt_tokens": 4},
    {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    {"model": "m", "text_1": "a", "text_2": ["b", "c"]},
    {"model": "m", "messages": [{"role": "user", "content": "u"}]},
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}, "required": ["a"]}
FORMED: Sequence[Any] = tuple(
    {"model": "m", "messages": [{"role": "user", "content": "u"}], **form}
    for form in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}, "tools": [TOOL]},
        {"structured_outputs": {"choice": ["a", "b"], "regex": "a|b"}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}, "response_format": {"type": "text"}},
        {
            "structured_outputs": {"json": json.dumps(SCHEMA)},
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    )
)
MESSAGES: Sequence[Any] = (
    {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"},
        "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 3}, "stream": True, "top_k": 3,
    },
)  # fmt: skip
RESPONSES: Sequence[Any] = (
    {
        "model": "m", "instructions": "i", "max_output_tokens": 5, "previous_response_id": "resp_1", "store": True,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}, "stream": True,
        "reasoning": {"effort": "low"}, "metadata": {"a": "b"}, "truncation": "auto", "include": [],
    },
    {"model": "m", "input": "u"},
)  # fmt: skip


def _prompts(endpoint: Any, body: bytes) -> Any:
    params = endpoint.parse(body)
    pool: Any = SimpleNamespace(tool_call_parser="", embeds_only=False, max_context_tokens=CONTEXT_TOKENS)
    call = Call(drawn_ids(), ANY_NAMESPACE, 0)
    call.pool, call.tokenizer = pool, TOKENIZER
    if (output := select_form(params, TOKENIZER.forms, pool.tool_call_parser).output) is not None:
        output.text.encode()
    return params, output, [prompt.encode(TOKENIZER, CONTEXT_TOKENS) for prompt in endpoint.prompts(params, call)]


def _vectors(body: bytes) -> Any:
    forms = EMBEDDINGS.parse, partial(parse, RerankRequest), partial(parse, ScoreRequest)
    return [_passing(form, (ApiError,))(body) for form in forms]


def _tokenize(body: bytes) -> Any:
    kinds = TokenizeRequest, TokenizeChatRequest, DetokenizeRequest
    return [_passing(partial(parse, kind), (ApiError,))(body) for kind in kinds]


# ------------------------------------------------------------------------------------------------ HTTP


OFFER = b"connection: x, Upgrade\r\nupgrade: h2c\r\n"
FIRST_LINE = re.compile(rb"(?!CONNECT )[A-Z]+ [!-~]+ HTTP/1\.[01]\r\n")
POSTED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HTTP = [
    b"GET /v1/models?a=%20b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n\r\nGET / HTTP/1.0\r\n\r\n",
    POSTED + b"Content-Length: 5\r\nExpect: 100-continue\r\n\r\nabcdeGET / HTTP/1.1\r\nhost: x\r\n\r\n",
    POSTED + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nx-a: b\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n",
    POSTED + OFFER + b"Content-Length: 3\r\n\r\nabc" + POSTED + OFFER + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    bytes([128, 12, 16, 15, 20, 7, 27, 28, 7, 13, 20, 7, 27, 28, 16, 15, 7, 11, 7]),
]


# Of what requests are made where the input begins with a byte beyond ASCII.
PIECES = (
    b"GET ", b"POST ", b"CONNECT ", b"/a ", b"x:80 ", b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", b"\r\n", b"\n", b"\r", b" ",
    b"GET /b HTTP/1.1\r\nhost: x\r\n", POSTED, POSTED + OFFER, b"host: y\r\n", b"connection: upgrade\r\n",
    b"Upgrade: h2c\r\n", b"connection: close\r\n", b"content-length: 5\r\n", b"content-length: 0\r\n",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip, chunked\r\n", b"transfer-encoding: x\r\n",
    b"expect: 100-continue\r\n", b"authorization: a\r\n", b"x-empty:\r\n", b"abcde", b"5\r\nabcde\r\n", b"0\r\n",
    b"\r\n\r\n", b"http://x:y/ ", b"host: x y\r\n",
)  # fmt: skip


def _http(raw: bytes) -> list[ReadRequest]:
    """However the bytes are cut they are the same requests, and an offer of another protocol changes none of them."""
    if raw[:1] >= b"\x80":
        raw = b"".join(PIECES[number % len(PIECES)] for number in raw[1:200])
    requests, step = read_requests(raw), 1 + len(raw) % 7
    cut = read_requests(*(raw[at : at + step] for at in range(0, len(raw), step)))
    assert cut == requests, f"{step} bytes a segment: {cut} in place of {requests}"
    if line := FIRST_LINE.match(raw):
        offering = read_requests(raw[: line.end()] + OFFER + raw[line.end() :])
        assert _without_offers(offering) == _without_offers(requests), f"{offering} in place of {requests}"
    return requests


def _without_offers(requests: Sequence[ReadRequest]) -> list[ReadRequest]:
    """Leave out hop-by-hop header fields."""
    own = b"connection", b"upgrade"
    return [
        request._replace(headers=[field for field in request.headers if field[0] not in own]) for request in requests
    ]


# ------------------------------------------------------------------------------------------------ files of tenants


CONFIG = json.loads(_read("adapters", "upper", "adapter_config.json"))
MODEL = json.loads(_read("model", "config.json"))
SPEC = parse_model_config(encoded(MODEL))


def _header_of(path: Path) -> Any:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


ADAPTER_HEADER = _header_of(QUICKSTART / "adapters" / "upper" / "adapter_model.safetensors")
MODEL_HEADER = _header_of(QUICKSTART / "model" / "model.safetensors")


def _safetensors(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def _size(raw: bytes) -> int:
    """Return the size of a file that has everything that its header names: no data has to be there."""
    try:
        rows: Any = json.loads(raw[8:])
        ends = [row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"]
        return len(raw) + max([end for end in ends if isinstance(end, int) and 0 <= end < 1 << 50], default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return len(raw)


def _adapter_weights(raw: bytes) -> Any:
    header = read_header(io.BytesIO(raw), _size(raw))
    return check_adapter(parse_adapter_config(encoded(CONFIG)), header, SPEC, max_rank=64)


def _adapter_config(raw: bytes) -> Any:
    config = parse_adapter_config(raw)
    header = _safetensors(encoded(ADAPTER_HEADER))
    modules = check_adapter(config, read_header(io.BytesIO(header), _size(header)), SPEC, max_rank=64)
    return config, verdict_of(config, modules, SPEC, len(header))


def _model_weights(raw: bytes) -> None:
    check_model_tensors(SPEC, {"model.safetensors": read_header(io.BytesIO(raw), _size(raw))})


def _model_config(raw: bytes) -> None:
    header = _safetensors(encoded(MODEL_HEADER))
    check_model_tensors(parse_model_config(raw), {"model.safetensors": read_header(io.BytesIO(header), _size(header))})


def _tokenizer(raw: bytes) -> None:
    tokenizer = ModelTokenizer({**TOKENIZER_FILES, "tokenizer.json": raw})
    tokenizer.decode(tokenizer.encode("Hello world", CONTEXT_TOKENS))


TEMPLATES = (
    TOKENIZER.config["chat_template"],
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ raise_exception('no') if messages | length > 9 }}",
    "{% set ns = namespace(a=0) %}{% for i in range(9) %}{% set ns.a = ns.a + i * 2 %}{% endfor %}{{ ns.a ** 2 }}",
    "{% macro f(x, y=1) %}{{ x ~ y }}{% endmacro %}{{ f('a', y='b' * 3) }}{{ messages | map(attribute='role') }}",
    "{{ messages[0].content.split(' ')[::-1] | reverse | list | string | replace('a', 'b') | upper }}{% break %}",
)


def _template(raw: bytes) -> str:
    template = ChatTemplate(raw.decode("utf-8", "replace"), {"eos_token": "</s>"}, lambda _form: "today")
    chat = Chat([{"role": "user", "content": "Hello <b>you</b>"}, {"role": "assistant", "content": "x"}], tools=[TOOL])
    return template.render(chat, 10_000)


# ------------------------------------------------------------------------------------------------ manifests, sources


def _manifests(raw: bytes) -> Any:
    admitted = _passing(lambda manifest: admit(manifest, lambda _ref: None), (Invalid,))
    return [admitted(obj.model_dump(by_alias=True)) for obj in load_text(raw.decode("utf-8", "replace"))]  # pyright: ignore


MANIFESTS = [path.read_bytes() for path in sorted(QUICKSTART.glob("*.yaml"))]
OCI: Sequence[Any] = (
    {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": {"digest": "sha256:0"},
        "layers": [
            {
                "mediaType": "a", "digest": "sha256:" + "a" * 64, "size": 5,
                "annotations": {"org.opencontainers.image.title": "adapter_config.json"},
            }
        ],
    },
)  # fmt: skip
HUB: Sequence[Any] = (
    {
        "sha": "a" * 40,
        "siblings": [
            {"rfilename": "adapter_config.json", "size": 5, "blobId": "b" * 40},
            {"rfilename": "f/adapter_model.safetensors", "size": 5, "lfs": {"sha256": "c" * 64, "size": 5}},
        ],
    },
)  # fmt: skip


def _oci(raw: bytes) -> None:
    parse_manifest(raw, lambda _name: True, "oci:x")
    parse_reference(raw.decode("utf-8", "replace")[:300])


def _hub(raw: bytes) -> None:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return  # httpx's own error, which the hub's client names
    for folder in ("", "f/"):
        if isinstance(answer, dict):
            parse_revision(answer, folder, lambda _name: True, "hf:a/b")


LISTING = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix>f/</Prefix><KeyCount>2</KeyCount>
<MaxKeys>250</MaxKeys><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>
<Contents><Key>f/adapter_config.json</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>
<ETag>&quot;0&quot;</ETag><Size>5</Size></Contents><CommonPrefixes><Prefix>f/g/</Prefix></CommonPrefixes>
</ListBucketResult>"""
DENIED = b"!<Error><Code>AccessDenied</Code><Message>no</Message></Error>"


class _PlayedBucket:
    """A client whose server answers each request with the same bytes; with an error where the first one is "!"."""

    def __init__(self) -> None:
        self.client = s3_client(
            Session(), "http://s3.invalid", "us-east-1", {}, connect_s=1, read_s=1, tries=1, connections=1
        )
        self.client.meta.events.register("before-send.s3", self._answer)
        self.body = b""

    def _answer(self, request: Any, **_: Any) -> AWSResponse:
        raw: Any = SimpleNamespace(stream=lambda: iter((self.body.removeprefix(b"!"),)))
        return AWSResponse(request.url, 403 if self.body[:1] == b"!" else 200, {}, raw)


BUCKET, ONE_TRY = _PlayedBucket(), RetryPolicy(tries=1)


def _s3(raw: bytes) -> None:
    BUCKET.body = raw
    snapshot = BucketSnapshot(BUCKET.client, Place("b", "f/"), ONE_TRY, lambda _name: True)
    assert all(size >= 0 for size in snapshot.sizes.values())
    assert snapshot.unchanged()


LINES: Sequence[Any] = (
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHATS[0]},
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {}},
)

# ------------------------------------------------------------------------------------------------ all of them


def _passing(run: Callable[[Any], Any], named: tuple[type[Exception], ...]) -> Callable[[Any], Any]:
    """Return a target that does the same, where errors that the edge names are as good as an answer."""

    def passing(data: Any) -> Any:
        try:
            return run(data)
        except named as error:
            if not str(error):
                raise AssertionError(f"{type(error).__name__} without a word") from error
            return f"{type(error).__name__}: {error}"

    return passing


def _json(run: Run, examples: Sequence[Any], *named: type[Exception], wrap: Callable[[bytes], bytes] = bytes) -> Target:
    """Make a target for JSON: bytes as they are, built of words, or an example that is edited."""
    words, checked = Words(examples), _passing(run, named)

    def either(data: bytes) -> Any:
        match data[:1]:
            case b"" | b"{" | b"[":
                return checked(wrap(data))
            case first:
                choices = Choices(data[1:])
                value = words.edited(choices, choices.of(examples)) if first[0] % 4 else words.value(choices)
                return checked(wrap(encoded(value)))

    return Target(either, [*map(encoded, examples), b"\1", b"\4abcdefgh"])


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _batch_file(raw: bytes) -> Any:
    """An input file means the same in one block and in two; the first byte says where they part."""

    def judged(*blocks: bytes) -> Any:
        reader = InputReader("/v1/chat/completions", max_lines=20, max_line_bytes=200, max_blank_lines=10)
        bad = [line for block in blocks if not reader.too_many for line in reader.feed(block)]
        bad += [] if reader.too_many else reader.finish()
        return bad, reader.total, reader.good, reader.failure()

    content, cut = raw[1:], sum(raw[:1])
    whole = judged(content)
    assert judged(content[:cut], content[cut:]) == whole
    return whole


TARGETS: Mapping[str, Target] = {
    "chat": _json(lambda body: _prompts(CHAT, body), CHATS, ApiError, NotEncodable),
    "completions": _json(lambda body: _prompts(COMPLETIONS, body), COMPLETED, ApiError, NotEncodable),
    "embeddings": _json(_vectors, EMBEDDED),
    "messages": _json(MessagesEndpoint().parse, MESSAGES, ApiError),
    "responses": _json(ResponsesEndpoint().parse, RESPONSES, ApiError),
    "structured-outputs": _json(lambda body: _prompts(CHAT, body), FORMED, ApiError, NotEncodable),
    "tokenize": _json(_tokenize, [{"model": "m", "prompt": "a"}, CHATS[0], {"model": "m", "tokens": [1]}]),
    "http": Target(_http, HTTP),
    "batch-file": Target(_batch_file, [b"\x09" + b"\n\r\n \n".join(map(_encoded, LINES)) + b"\n\n" * 9]),
    "batch-line": _json(lambda raw: read_line(raw, "/v1/chat/completions", 1 << 20), LINES),
    "chat-template": Target(
        _passing(_template, (TemplateRefused, TemplateFault)), [text.encode() for text in TEMPLATES]
    ),
    "manifests": Target(_passing(_manifests, (ManifestError,)), MANIFESTS),
    "adapter-config": _json(_adapter_config, [CONFIG], Refused),
    "adapter-weights": _json(_adapter_weights, [ADAPTER_HEADER], Refused, wrap=_safetensors),
    "model-config": _json(_model_config, [MODEL], Refused),
    "model-weights": _json(_model_weights, [MODEL_HEADER], Refused, wrap=_safetensors),
    "tokenizer": _json(_tokenizer, [json.loads(TOKENIZER_FILES["tokenizer.json"])], ValueError),
    "oci-manifest": _json(_oci, OCI, Refused),
    "hub-revision": _json(_hub, HUB, Refused, Unavailable),
    "s3-listing": Target(_passing(_s3, (Refused, Unavailable)), [LISTING, LISTING.replace(b"true", b"false"), DENIED]),
    "peer-messages": Target(_passing(decoded, (PeerError, DecodeError)), [bytes(range(n, 200)) for n in range(12)]),
    "kv-frames": Target(
        _passing(kv_frames, (PeerError, DecodeError, KvConnectionClosed)), [b"\0" + frames(0, 3, 200), b"\xff\x80"]
    ),
    "scheduler": Target(scheduler_core, [bytes(range(n, 250)) for n in range(8)]),
    "supervisor": Target(supervisor_core, [bytes(range(n, 250)) for n in range(8)]),
    "runner": Target(runner_core, [bytes(range(n, 250)) for n in range(8)]),
    "gateway": Target(gateway_core, [bytes(range(n, 250)) for n in range(8)]),
}
