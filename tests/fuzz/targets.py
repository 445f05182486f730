"""The targets by name, each with its examples."""

import io
import json
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
from google.protobuf.message import DecodeError, Message

from fuzz.building import Choices, Words, encoded, filled
from harness.scheduler_driver import Driver
from weft.api.manifests import ManifestError, load_text
from weft.artifacts.adapter_config import parse_adapter_config
from weft.artifacts.errors import Unavailable
from weft.domain.fleet import FleetReport
from weft.domain.ids import Epoch, RunnerId
from weft.domain.limits import LimitReport
from weft.domain.machine import TICK, Close, Closed, Connected, Kind, Peer, Received
from weft.domain.model.adapter import check_adapter
from weft.domain.model.config import parse_model_config
from weft.domain.model.errors import Refused
from weft.domain.model.safetensors import read_header
from weft.domain.model.tensors import check_model_tensors
from weft.domain.request import (
    Assign,
    EndReason,
    FinishReason,
    GatewayHello,
    Sampling,
    SequenceTokens,
    SessionHello,
    Start,
    Step,
)
from weft.domain.routes import PoolRoute, RegistryHello, Route, Routes
from weft.domain.runner import SupervisorHello
from weft.wire.codec.batch import BATCH_TO_GATEWAY, GATEWAY_TO_BATCH
from weft.wire.codec.cluster import (
    RUNNER_TO_SUPERVISOR,
    SCHEDULER_TO_SUPERVISOR,
    SUPERVISOR_TO_RUNNER,
    SUPERVISOR_TO_SCHEDULER,
)
from weft.wire.codec.kv_transfer import KV_FROM_RECEIVER, KV_FROM_SENDER
from weft.wire.codec.registry import REGISTRY_TO_SCHEDULER, SCHEDULER_TO_REGISTRY
from weft.wire.codec.scheduling import GATEWAY_TO_SCHEDULER, SCHEDULER_TO_GATEWAY
from weft.wire.codec.session import GATEWAY_TO_RUNNER, RUNNER_TO_GATEWAY
from weft.wire.errors import PeerError
from weft_batch.core.input_lines import read_line
from weft_depot.sources.hf import parse_revision
from weft_depot.sources.oci import parse_manifest, parse_reference
from weft_gateway.core.config import GatewayConfig
from weft_gateway.core.events import SCHEDULER as TO_SCHEDULER
from weft_gateway.core.events import (
    ModelResolved,
    OpenSession,
    PreparedRequest,
    RequestArrived,
    RequestReady,
    TokenizerChanged,
    TokenizerState,
)
from weft_gateway.core.gateway import Gateway
from weft_gateway.errors import ApiError
from weft_gateway.openai.chat import CHAT
from weft_gateway.openai.completions import COMPLETIONS
from weft_gateway.openai.embeddings import EMBEDDINGS, RerankRequest, ScoreRequest
from weft_gateway.openai.messages import parse_messages
from weft_gateway.openai.responses import parse_responses
from weft_gateway.openai.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, parse
from weft_gateway.openai.validation import ParsedRequest
from weft_gateway.shell.chat_template import Chat, ChatTemplate, TemplateRefused
from weft_gateway.shell.tokenizer import ModelTokenizer, NotEncodable
from weft_operator.local.admission import Invalid, admit
from weft_runner.core.admission import PoolLimits
from weft_runner.core.batch import BatchLimits
from weft_runner.core.events import (
    CompileGrammar,
    Fetch,
    Fetched,
    FetchFailed,
    GrammarCompiled,
    Load,
    Loaded,
    LoadFailed,
    RunStep,
    StepDone,
    StepSlot,
    SwapDone,
    SwapFailed,
    SwapIn,
    SwapOut,
)
from weft_runner.core.runner import Runner
from weft_runner.core.sampling import SampledToken
from weft_runner.shell.kv_connection import KvConnection, KvConnectionClosed
from weft_supervisor.core.supervisor import Supervisor, SupervisorConfig, runner_peer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
CONTEXT_TOKENS = 256
Run = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    """`run` raises nothing but findings. `examples`: valid inputs."""

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
    },
)  # fmt: skip
COMPLETED: Sequence[Any] = (
    {
        "model": "m", "prompt": ["a", "b"], "max_tokens": 5, "echo": True, "logprobs": 2, "best_of": 3, "n": 2,
        "suffix": "z", "stop": "x", "user": "u", "top_k": 4, "min_p": 0.1, "ignore_eos": True, "prompt_logprobs": 1,
        "repetition_penalty": 1.1, "structured_outputs": {"regex": "[a-c]+"}, "stop_token_ids": [3],
    },
    {"model": "m", "prompt": [[1, 2, 3]], "guided_choice": ["a", "b"], "stream": False, "min_tokens": 2},
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
        {"structured_outputs": {"choice": ["a", "b"], "regex": "a|b"}, "guided_regex": "[a-z]+"},
        {"guided_grammar": 'root ::= "a" | "b"', "response_format": {"type": "text"}, "guided_choice": ["a"]},
        {"guided_json": json.dumps(SCHEMA), "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
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


def _prompts(endpoint: Any, body: bytes) -> None:
    params = endpoint.parse(body)
    pool: Any = SimpleNamespace(tool_call_parser="", embeds_only=False, max_context_tokens=CONTEXT_TOKENS)
    route: Any = SimpleNamespace(model_name="m")
    parsed = ParsedRequest(params, route, pool, TOKENIZER)
    if (form := params.form(parsed.tools)) is not None:
        form.text.encode()
    for prompt in endpoint.prompts_of(parsed):
        prompt.encode(TOKENIZER, CONTEXT_TOKENS)


def _vectors(body: bytes) -> None:
    for form in (EMBEDDINGS.parse, partial(parse, RerankRequest), partial(parse, ScoreRequest)):
        _passing(form, (ApiError,))(body)


def _tokenize(body: bytes) -> None:
    for kind in (TokenizeRequest, TokenizeChatRequest, DetokenizeRequest):
        _passing(partial(parse, kind), (ApiError,))(body)


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
    """Of a file that has everything that its header names: no data has to be there."""
    try:
        rows: Any = json.loads(raw[8:])
        ends = [row["data_offsets"][1] for name, row in rows.items() if name != "__metadata__"]
        return len(raw) + max([end for end in ends if isinstance(end, int) and 0 <= end < 1 << 50], default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return len(raw)


def _adapter_weights(raw: bytes) -> None:
    header = read_header(io.BytesIO(raw), _size(raw))
    check_adapter(parse_adapter_config(encoded(CONFIG)), header, SPEC, max_rank=64)


def _adapter_config(raw: bytes) -> None:
    config = parse_adapter_config(raw)
    header = _safetensors(encoded(ADAPTER_HEADER))
    check_adapter(config, read_header(io.BytesIO(header), _size(header)), SPEC, max_rank=64)


def _model_weights(raw: bytes) -> None:
    check_model_tensors(SPEC, {"model.safetensors": read_header(io.BytesIO(raw), _size(raw))})


def _model_config(raw: bytes) -> None:
    header = _safetensors(encoded(MODEL_HEADER))
    check_model_tensors(parse_model_config(raw), {"model.safetensors": read_header(io.BytesIO(header), _size(header))})


def _tokenizer(raw: bytes) -> None:
    tokenizer = ModelTokenizer({**TOKENIZER_FILES, "tokenizer.json": raw})
    tokenizer.decode(tokenizer.encode("Hello world", CONTEXT_TOKENS))


TEMPLATES = (
    TOKENIZER.template,
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ raise_exception('no') if messages | length > 9 }}",
    "{% set ns = namespace(a=0) %}{% for i in range(9) %}{% set ns.a = ns.a + i * 2 %}{% endfor %}{{ ns.a ** 2 }}",
    "{% macro f(x, y=1) %}{{ x ~ y }}{% endmacro %}{{ f('a', y='b' * 3) }}{{ messages | map(attribute='role') }}",
    "{{ messages[0].content.split(' ')[::-1] | reverse | list | string | replace('a', 'b') | upper }}{% break %}",
)


def _template(raw: bytes) -> None:
    template = ChatTemplate(raw.decode("utf-8", "replace"), {"eos_token": "</s>"}, lambda _form: "today")
    chat = Chat([{"role": "user", "content": "Hello <b>you</b>"}, {"role": "assistant", "content": "x"}], tools=[TOOL])
    template.render(chat, 10_000)


# ------------------------------------------------------------------------------------------------ manifests, sources


def _manifests(raw: bytes) -> None:
    for obj in load_text(raw.decode("utf-8", "replace")):
        _passing(lambda manifest: admit(manifest, lambda _ref: None), (Invalid,))(obj.model_dump(by_alias=True))  # pyright: ignore


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


LINES: Sequence[Any] = (
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHATS[0]},
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {}},
)

# ------------------------------------------------------------------------------------------------ peers


DIRECTIONS: Mapping[str, Any] = {
    "gateway-to-scheduler": GATEWAY_TO_SCHEDULER,
    "scheduler-to-gateway": SCHEDULER_TO_GATEWAY,
    "supervisor-to-scheduler": SUPERVISOR_TO_SCHEDULER,
    "scheduler-to-supervisor": SCHEDULER_TO_SUPERVISOR,
    "runner-to-supervisor": RUNNER_TO_SUPERVISOR,
    "supervisor-to-runner": SUPERVISOR_TO_RUNNER,
    "registry-to-scheduler": REGISTRY_TO_SCHEDULER,
    "scheduler-to-registry": SCHEDULER_TO_REGISTRY,
    "kv-from-sender": KV_FROM_SENDER,
    "kv-from-receiver": KV_FROM_RECEIVER,
    "gateway-to-batch": GATEWAY_TO_BATCH,
    "batch-to-gateway": BATCH_TO_GATEWAY,
    "gateway-to-runner": GATEWAY_TO_RUNNER,
    "runner-to-gateway": RUNNER_TO_GATEWAY,
}
NAMES = ("g", "s", "r", "q", "acme", "acme/p", "acme/m", "base", "sha256:1", "sha256:base", "uid-sha256:1", "cpu/x")


def _decoded(data: bytes) -> None:
    """A message of one direction: raw bytes, or a filled envelope."""
    choices = Choices(data)
    direction: Any = choices.of([*DIRECTIONS.values()])
    _decode(direction, choices, data[1:])


def _decode(direction: Any, choices: Choices, raw: bytes) -> Any:
    envelope: Message = direction.envelope()
    if choices.number(8):
        filled(envelope, choices, NAMES)
    else:
        envelope.ParseFromString(raw)
    return direction.decode(envelope)


def _kv_frames(data: bytes) -> None:
    """What another runner writes into a connection of KV, from its first byte to its end."""
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data[1:])
        there.shutdown(socket.SHUT_WR)
        connection = KvConnection(here, stall_s=1.0)
        direction = KV_FROM_SENDER if data[:1] < b"\x80" else KV_FROM_RECEIVER
        while True:
            envelope = direction.envelope()
            envelope.ParseFromString(connection.receive_frame())
            direction.decode(envelope)


def _frames(*sizes: int) -> bytes:
    return b"".join(struct.pack(">I", size) + bytes(range(size % 256)) for size in sizes)


GATEWAY, SUPERVISOR, REGISTRY = Peer(Kind.GATEWAY, "g"), Peer(Kind.SUPERVISOR, "s"), Peer(Kind.REGISTRY, "registry")
HELLOS = {
    GATEWAY: GatewayHello("g", applies_routes=True),
    SUPERVISOR: SupervisorHello("s"),
    REGISTRY: RegistryHello(None),
}
SENDS = {GATEWAY: GATEWAY_TO_SCHEDULER, SUPERVISOR: SUPERVISOR_TO_SCHEDULER, REGISTRY: REGISTRY_TO_SCHEDULER}


def _scheduler(data: bytes) -> None:
    """Peers of every kind say anything in any order; the scheduler goes on, and its books balance."""
    choices, driver = Choices(data), Driver().start("sha256:1")
    driver.runner("r")
    for _ in range(1 + choices.number(12)):
        peer = choices.of([*SENDS])
        match choices.number(10):
            case 0:
                driver.handle(Closed(peer))
                driver.handle(Connected(peer, HELLOS[peer]))
            case 1:
                driver.now += choices.of((0.001, 0.3, 6.0, 61.0))
                driver.handle(TICK)
            case 2:
                driver.submit("q", "sha256:1")
            case _:
                try:
                    message = _decode(SENDS[peer], choices, data[1:])
                except (PeerError, DecodeError):
                    continue
                if not isinstance(message, GatewayHello | SupervisorHello):
                    driver.handle(Received(peer, message))
    driver.core.check()


def _supervisor(data: bytes) -> None:
    """Runners and a scheduler say anything in any order; the supervisor goes on, and its books balance."""
    choices, core, now = Choices(data), Supervisor(SupervisorConfig()), 0.0
    scheduler, runners = Peer(Kind.SCHEDULER, "scheduler"), dict[str, Peer]()
    core.handle(Connected(scheduler), now)
    for _ in range(1 + choices.number(12)):
        now += choices.of((0.001, 0.3, 1.0, 3.0))
        try:
            if choices.number(4):
                message = _decode(RUNNER_TO_SUPERVISOR, choices, data[1:])
                if hasattr(message, "total_pages"):
                    peer = runner_peer(message.runner)
                    runners[peer.name] = peer
                    core.handle(Connected(peer, message), now)
                elif runners:
                    core.handle(Received(choices.of([*runners.values()]), message), now)
            else:
                core.handle(Received(scheduler, _decode(SCHEDULER_TO_SUPERVISOR, choices, data[1:])), now)
        except (PeerError, DecodeError):
            continue
        core.handle(TICK, now)
    core.check()


RUNNER_LIMITS = PoolLimits(12, 4, 5, 2, 40, 9, frozenset([0]), BatchLimits(1, 7), 3, host_bytes=25)
SESSION = Peer(Kind.GATEWAY, "g")


def _runner(data: bytes) -> None:
    """A gateway and a supervisor say anything in any order; the runner computes, and its books balance."""
    choices, core, now = Choices(data), Runner(RUNNER_LIMITS), 0.0
    waiting: list[Any] = []  # for what the shell does beside the steps

    def handle(event: Any) -> None:
        effects = core.handle(event, now)
        core.check()
        waiting.extend(one for one in effects if isinstance(one, Fetch | Load | SwapOut | SwapIn | CompileGrammar))
        for step in (one for one in effects if isinstance(one, RunStep)):
            rows = [row.key for row in step.batch.rows if row.samples]
            failures = {key: "torn" for key in rows if not choices.number(16)}
            tokens = {key: SampledToken(choices.number(40)) for key in rows if key not in failures}
            handle(StepDone(step, tokens, failures, 1.0))

    handle(Connected(SESSION, SessionHello("g", "i")))
    handle(Connected(SUPERVISOR))
    for _ in range(1 + choices.number(16)):
        match choices.number(12):
            case 0:
                handle(Closed(SESSION))
                handle(Connected(SESSION, SessionHello("g", "i")))
            case 1:
                now += choices.of((0.001, 0.06, 3.0, 31.0))
                handle(TICK)
            case 2 | 3:
                handle(StepSlot())
            case 4 if waiting:
                handle(_result_of(waiting.pop(0), fails=not choices.number(4)))
            case 5:
                prompt = tuple(choices.number(40) for _ in range(1 + choices.number(12)))
                epoch = Epoch(1, choices.number(8))
                handle(Received(SESSION, Start(choices.of(NAMES), epoch, prompt, (), 8, choices.number(9))))
            case kind:
                peer, direction = (SUPERVISOR, SUPERVISOR_TO_RUNNER) if kind < 8 else (SESSION, GATEWAY_TO_RUNNER)
                try:
                    message = _decode(direction, choices, data[1:])
                except (PeerError, DecodeError):
                    continue
                handle(Received(peer, message))


def _result_of(order: Any, *, fails: bool) -> Any:
    """What the shell of a runner reports of what the runner has ordered."""
    match order:
        case Fetch(digest):
            failed = FetchFailed(digest, EndReason.INTERNAL, "torn", permanent=False)
            return failed if fails else Fetched(digest, 10 if order.measure else None, 10 if order.to_host else None)
        case Load(digest):
            failed = LoadFailed(digest, EndReason.INTERNAL, "torn", permanent=False)
            return failed if fails else Loaded(digest, 4, 10, 10, 0.1)
        case CompileGrammar():
            return GrammarCompiled(order.peer, order.request_id, order.epoch, None, "no grammar")
        case _:
            return SwapFailed(order.number, "torn") if fails else SwapDone(order.number, len(order.pages), 0.1)


ROUTES = Routes(
    version=1,
    full=True,
    routes=(Route("acme/m", "acme", "acme/p", "sha256:1"),),
    pools=(PoolRoute("acme/p", "sha256:base", "m", 512, 1),),
)
RUNNERS = tuple(RunnerId(*of) for of in (("r", "q"), ("r", "r"), ("q", "q")))


def _gateway(data: bytes) -> None:
    """A scheduler, a predictor and runners say anything in any order; the gateway goes on, and its books balance."""
    choices, core, now, counter = Choices(data), Gateway(GatewayConfig(), "g", lambda _outcome: b""), 100.0, 0
    sessions: dict[Peer, None] = {}

    def handle(event: Any) -> None:
        for effect in core.handle(event, now):
            match effect:
                case OpenSession(peer):
                    sessions[peer] = None
                case Close(peer):
                    sessions.pop(peer, None)
                case _:
                    pass
        core.check()

    handle(Connected(TO_SCHEDULER))
    handle(Received(TO_SCHEDULER, ROUTES))
    handle(TokenizerChanged("sha256:base", TokenizerState.READY))
    for _ in range(1 + choices.number(16)):
        match choices.number(12):
            case 0:
                now += choices.of((0.001, 0.06, 6.0, 61.0))
                handle(TICK)
            case 1:
                handle(choices.of((Closed, Connected))(TO_SCHEDULER))
            case 2 if sessions:
                handle(choices.of((Closed, Connected))(choices.of([*sessions])))
            case 3 | 4:
                counter += 1
                request_id, n = f"q{counter}", 1 + choices.number(2)
                handle(RequestArrived(request_id))
                if core.admission.in_flight:
                    handle(ModelResolved(request_id, "acme/p", n))
                    handle(RequestReady(_prepared(request_id, n)))
            case 5 if core.requests:
                epoch, runner = Epoch(1, choices.number(8)), choices.of(RUNNERS)
                handle(Received(TO_SCHEDULER, Assign(choices.of([*core.requests]), epoch, runner, "h:1", 8)))
            case 6 if core.requests and sessions:
                handle(Received(choices.of([*sessions]), _step(core, choices)))
            case kind:
                if kind > 9 and not sessions:
                    continue
                peer = choices.of([*sessions]) if kind > 9 else TO_SCHEDULER
                try:
                    message = _decode(RUNNER_TO_GATEWAY if kind > 9 else SCHEDULER_TO_GATEWAY, choices, data[1:])
                except (PeerError, DecodeError):
                    continue
                if not isinstance(message, FleetReport | LimitReport):  # of the shell
                    handle(Received(peer, message))


def _prepared(request_id: str, n: int) -> PreparedRequest:
    return PreparedRequest(
        request_id, request_id, "acme", ROUTES.routes[0], (1, 2), "text", 100, Sampling(),
        lambda token: bytes([token % 256]), 5_000, n=n,
    )  # fmt: skip


def _step(core: Gateway, choices: Choices) -> Step:
    """The next tokens of a request, or some that nobody waits for."""
    request_id = choices.of([*core.requests])
    stream = core.requests[request_id].stream
    epoch = stream.running.epoch if stream.running and choices.number(4) else Epoch(1, choices.number(8))
    at = len(stream.tokens) if choices.number(4) else choices.number(8)
    finish = choices.of((None, None, None, FinishReason.EOS, FinishReason.LENGTH))
    return Step(1, [SequenceTokens(request_id, epoch, at, choices.rest(choices.number(4)), finish)])


# ------------------------------------------------------------------------------------------------ all of them


def _passing(run: Callable[[Any], Any], named: tuple[type[Exception], ...]) -> Callable[[Any], None]:
    """The same; errors that the edge names are as good as an answer."""

    def passing(data: Any) -> None:
        try:
            run(data)
        except named as error:
            if not str(error):
                raise AssertionError(f"{type(error).__name__} without a word") from error

    return passing


def _json(run: Run, examples: Sequence[Any], *named: type[Exception], wrap: Callable[[bytes], bytes] = bytes) -> Target:
    """Of JSON: bytes as they are, built of words, or an example that is edited."""
    words, checked = Words(examples), _passing(run, named)

    def either(data: bytes) -> None:
        match data[:1]:
            case b"" | b"{" | b"[":
                checked(wrap(data))
            case first:
                choices = Choices(data[1:])
                value = words.edited(choices, choices.of(examples)) if first[0] % 4 else words.value(choices)
                checked(wrap(encoded(value)))

    return Target(either, [*map(encoded, examples), b"\1", b"\4abcdefgh"])


TARGETS: Mapping[str, Target] = {
    "chat": _json(lambda body: _prompts(CHAT, body), CHATS, ApiError, NotEncodable),
    "completions": _json(lambda body: _prompts(COMPLETIONS, body), COMPLETED, ApiError, NotEncodable),
    "embeddings": _json(_vectors, EMBEDDED),
    "messages": _json(parse_messages, MESSAGES, ApiError),
    "responses": _json(parse_responses, RESPONSES, ApiError),
    "structured-outputs": _json(lambda body: _prompts(CHAT, body), FORMED, ApiError, NotEncodable),
    "tokenize": _json(_tokenize, [{"model": "m", "prompt": "a"}, CHATS[0], {"model": "m", "tokens": [1]}]),
    "batch-line": _json(lambda raw: read_line(raw, "/v1/chat/completions", 1 << 20), LINES),
    "chat-template": Target(
        _passing(_template, (TemplateRefused, jinja2.TemplateSyntaxError)), [text.encode() for text in TEMPLATES]
    ),
    "manifests": Target(_passing(_manifests, (ManifestError,)), MANIFESTS),
    "adapter-config": _json(_adapter_config, [CONFIG], Refused),
    "adapter-weights": _json(_adapter_weights, [ADAPTER_HEADER], Refused, wrap=_safetensors),
    "model-config": _json(_model_config, [MODEL], Refused),
    "model-weights": _json(_model_weights, [MODEL_HEADER], Refused, wrap=_safetensors),
    "tokenizer": _json(
        _tokenizer, [json.loads(TOKENIZER_FILES["tokenizer.json"])], ValueError, jinja2.TemplateSyntaxError
    ),
    "oci-manifest": _json(_oci, OCI, Refused),
    "hub-revision": _json(_hub, HUB, Refused, Unavailable),
    "peer-messages": Target(_passing(_decoded, (PeerError, DecodeError)), [bytes(range(n, 200)) for n in range(12)]),
    "kv-frames": Target(
        _passing(_kv_frames, (PeerError, DecodeError, KvConnectionClosed)), [b"\0" + _frames(0, 3, 200), b"\xff\x80"]
    ),
    "scheduler": Target(_scheduler, [bytes(range(n, 250)) for n in range(8)]),
    "supervisor": Target(_supervisor, [bytes(range(n, 250)) for n in range(8)]),
    "runner": Target(_runner, [bytes(range(n, 250)) for n in range(8)]),
    "gateway": Target(_gateway, [bytes(range(n, 250)) for n in range(8)]),
}
