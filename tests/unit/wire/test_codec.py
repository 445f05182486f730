"""Every message of every direction survives its bytes; hostile bytes cost their sender a PeerError."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.adapter import AdapterVersion, Tier
from weft.domain.batch import BatchJob, LineResult, NewBatch, NewFile, Page, RunLine, StoredFile
from weft.domain.bounds import MAX_REQUEST_TOKENS
from weft.domain.ids import MAX_TERM, NEVER, Epoch, RunnerId
from weft.domain.kv_transfer import KvComplete
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import EndReason, FinishReason, Outcome, Sampling, SequenceTokens, Step, Submit
from weft.domain.routes import PoolSpec, SloAttainment
from weft.domain.runner import ClusterReport, ReportedRunner, RunnerReport, RunnerSpec
from weft.wire.codec import batch, cluster, kv_transfer, registry, scheduling, session
from weft.wire.codec.cluster import read_report, read_spec, received_report
from weft.wire.codec.prediction import predict_items, predict_response, predictions
from weft.wire.errors import PeerError
from weft.wire.v1 import batch_pb2, common_pb2, predictor_pb2, scheduler_pb2, supervisor_pb2

ONES = st.integers(1, 1000)
EIGHTHS = st.integers(1, 80).map(lambda eighth: eighth / 8)  # exact in a float of the contract
BASICS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text("abcdefgh/-.é", min_size=1, max_size=8),
    int: ONES,
    float: EIGHTHS,
    bool: st.booleans(),
    bytes: st.binary(min_size=1, max_size=10),
    Epoch: st.builds(Epoch, st.integers(0, MAX_TERM - 1), ONES),
    Tier: st.sampled_from([tier for tier in Tier if tier is not Tier.DEVICE]),
    FinishReason | None: st.sampled_from([None, FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP]),
}
WHOLE_SECONDS = {"idle_s", "drain_s"}
DIRECTIONS: dict[str, Any] = {
    name: direction
    for module in (batch, cluster, kv_transfer, registry, scheduling, session)
    for name, direction in vars(module).items()
    if "_TO_" in name or "_FROM_" in name
}


@cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the domain."""
    if hint in BASICS:
        return BASICS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return st.one_of(*(st.none() if arg is type(None) else values_of(arg) for arg in args))
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*map(values_of, args))
    if origin is Mapping:
        return st.dictionaries(*map(values_of, args), max_size=3)
    if origin in (tuple, Sequence):
        return st.lists(values_of(args[0]), max_size=3, unique_by=_name).map(tuple)
    if not hasattr(hint, "_fields") and not dataclasses.is_dataclass(hint):
        return st.sampled_from(list(hint))
    fields = {name: values_of(field) for name, field in get_type_hints(hint).items()}
    fields |= {name: ONES.map(float) for name in WHOLE_SECONDS & fields.keys()}
    return st.builds(hint, **fields).map(_allowed)


def _name(value: Any) -> Any:
    """Elements of one list differ in their names."""
    return getattr(value, "digest", value)


def _allowed(value: Any) -> Any:
    """The nearest value that its sender may send."""
    if isinstance(value, RunnerSpec):
        return dataclasses.replace(value, max_context_tokens=1)
    if isinstance(value, Submit) and value.runner is None:
        return dataclasses.replace(value, epoch=NEVER, reservation_tokens=0, start_emitted_tokens=0, token_runner=None)
    if isinstance(value, KvComplete):
        return dataclasses.replace(
            value, logprobs=value.logprobs[: len(value.tokens)], tokens=value.tokens[: len(value.logprobs)]
        )
    if isinstance(value, LineResult):
        return dataclasses.replace(value, status=100 + value.status % 500)
    if isinstance(value, PoolSpec):
        return dataclasses.replace(value, tenant_weights=tuple(sorted(dict(value.tenant_weights).items())))
    if isinstance(value, AdapterVersion):
        return value._replace(weight=value.weight % 101)
    if isinstance(value, SloAttainment):
        return SloAttainment(*[min(100, share) for share in value])
    if isinstance(value, SequenceTokens):
        return value._replace(doublings=value.doublings % 64)
    if isinstance(value, ReportedRunner) and value.spec is not None:
        return value._replace(spec=dataclasses.replace(value.spec, runner=value.runner))
    return value


def plain(value: Any) -> Any:
    """With tuples for all sequences."""
    if isinstance(value, (str, bytes)) or value is None:
        return value
    if hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)})
    return tuple(map(plain, value)) if isinstance(value, Sequence) else value


@cache
def messages_of(direction: Any) -> st.SearchStrategy[Any]:
    return st.one_of(*map(values_of, direction.messages))


@pytest.mark.parametrize("name", DIRECTIONS)
@given(data=st.data())
def test_a_message_comes_out_as_it_went_in(name: str, data: st.DataObject) -> None:
    direction = DIRECTIONS[name]
    message = data.draw(messages_of(direction))
    sent = direction.encode(message).SerializeToString()
    assert plain(direction.decode(direction.envelope.FromString(sent))) == plain(message)


def full(hint: Any, numbers: Iterator[int]) -> Any:
    """A value of a type of the domain with all that it can have, each number and text another one."""
    origin, args, number = get_origin(hint), get_args(hint), next(numbers)
    basics: dict[Any, Any] = {
        str: f"t{number}", int: number, float: float(number), bool: True, bytes: b"%d" % number,
        Epoch: Epoch(1, number), Tier: Tier.HOST, FinishReason | None: FinishReason.STOP,
    }  # fmt: skip
    if hint in basics:
        return basics[hint]
    if origin in (types.UnionType, Union):
        return full(next(arg for arg in args if arg is not type(None)), numbers)
    if origin is Mapping:
        return {full(args[0], numbers): full(args[1], numbers)}
    if origin in (tuple, Sequence):
        of_elements = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * 2
        return tuple(full(arg, numbers) for arg in of_elements)
    if not hasattr(hint, "_fields") and not dataclasses.is_dataclass(hint):
        return list(hint)[-1]
    return _allowed(hint(**{name: full(field, numbers) for name, field in get_type_hints(hint).items()}))


@pytest.mark.parametrize(("name", "of"), [(name, of) for name, one in DIRECTIONS.items() for of in one.messages])
def test_every_field_of_every_message_comes_out_as_it_went_in(name: str, of: Any) -> None:
    direction, message = DIRECTIONS[name], full(of, count(1))
    sent = direction.encode(message).SerializeToString()
    assert plain(direction.decode(direction.envelope.FromString(sent))) == plain(message)


@given(report=values_of(RunnerReport), runner=values_of(RunnerId))
def test_a_report_that_a_supervisor_forwards_arrives_as_one_that_it_encodes(report: Any, runner: RunnerId) -> None:
    sent = cluster.RUNNER_TO_SUPERVISOR.encode(report).SerializeToString()
    received: Any = cluster.RUNNER_TO_SUPERVISOR.decode(cluster.RUNNER_TO_SUPERVISOR.envelope.FromString(sent))
    assert received.message is not None
    assert received._replace(version=0).message is None, "changed: it is encoded again"
    messages = [cluster.SUPERVISOR_TO_SCHEDULER.encode(ClusterReport((ReportedRunner(runner, one),)))
                for one in (received, report)]  # fmt: skip
    assert messages[0] == messages[1]


def test_what_a_large_report_has_beside_its_values_is_not_forwarded() -> None:
    sent = supervisor_pb2.RunnerReport(version=1, adapters=[{"digest": "d", "error": "x" * (16 << 10)}])
    report = received_report(sent)
    reported = cluster.SUPERVISOR_TO_SCHEDULER.encode(ClusterReport((ReportedRunner(RunnerId("u", "i"), report),)))
    assert (report.message, len(reported.report.reports[0].report.adapters[0].error)) == (None, 1_000)


@given(outcome=values_of(Outcome), finish=st.sampled_from(FinishReason))
def test_an_outcome_comes_out_of_its_record(outcome: Outcome, finish: FinishReason) -> None:
    outcome = dataclasses.replace(outcome, finish=finish)
    assert scheduling.outcome_from_bytes(scheduling.outcome_bytes(outcome)) == outcome


@pytest.mark.parametrize("name", DIRECTIONS)
@given(data=st.data())
def test_hostile_bytes_are_an_error_of_their_sender(name: str, data: st.DataObject) -> None:
    """Bytes of a good message with some of them changed: a message of the domain, or the peer's error."""
    direction = DIRECTIONS[name]
    sent = bytearray(direction.encode(data.draw(messages_of(direction))).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if sent:
            sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        envelope = direction.envelope.FromString(bytes(sent))
    except DecodeError:
        return
    try:
        message = direction.decode(envelope)
    except PeerError:
        return
    assert isinstance(message, direction.messages)


@given(data=st.data())
def test_what_calls_of_the_batch_service_carry_comes_out_as_it_went_in(data: st.DataObject) -> None:
    def drawn(of: type) -> Any:
        return data.draw(values_of(of))

    file, job, new, order, page = map(drawn, (StoredFile, BatchJob, NewFile, NewBatch, Page))
    assert batch.stored_files(batch.file_list([file], True)) == ([file], True)
    read, more = batch.batch_jobs(batch.batch_list([job], False))
    assert ([plain(job) for job in read], more) == ([plain(job)], False)
    assert batch.upload_part(batch.upload_header(new)) == new
    assert batch.upload_part(batch.upload_chunk(b"chunk")) == b"chunk"
    assert batch.NEW_BATCH.decode(batch.NEW_BATCH.encode(order)) == order
    assert batch.PAGE.decode(batch.PAGE.encode(page)) == page
    assert batch.file_named(batch_pb2.FileRequest(namespace="ns", file_id="file-1")) == ("ns", "file-1")
    assert batch.batch_named(batch_pb2.BatchRequest(batch_id="batch_1")) == ("", "batch_1")


def test_lines_are_put_into_as_few_messages_as_their_bodies_fit_into() -> None:
    sizes = [600_000, 400_000, 100_000, 3 << 20, 0, 1 << 20, 1]
    lines = [RunLine("b", number, "", "e", bytes(size)) for number, size in enumerate(sizes, 1)]
    assert [[line.line for line in part] for part in batch.in_messages(lines)] == [[1, 2], [3], [4], [5, 6], [7]]


@pytest.mark.parametrize(
    ("read", "message", "what"),
    [
        (batch.upload_part, batch_pb2.UploadFileRequest(), "unknown part"),
        (
            batch.upload_part,
            batch_pb2.UploadFileRequest(header={"purpose": "fine-tune"}),
            "purpose 'fine-tune' is not 'batch'",
        ),
        (batch.NEW_BATCH.decode, batch_pb2.CreateBatchRequest(endpoint="/v1/x"), "input_file_id is empty"),
        (batch.BATCH.decode, batch_pb2.BatchJob(batch_id="b", input_file_id="f"), "batch status 0 is unknown"),
    ],
)
def test_a_call_of_the_batch_service_outside_its_bounds_is_an_error(read: Any, message: Any, what: str) -> None:
    with pytest.raises(PeerError, match=what):
        read(message)


ITEM = PredictItem("r", "text", "ns/p", "m", 4, 100, "ns")


@given(st.lists(ONES, min_size=4, max_size=4).map(sorted), ONES)
def test_a_prediction_comes_out_as_it_went_in(tokens: list[int], bucket: int) -> None:
    p10, p50, p90, p99 = tokens
    predicted = [Prediction("r", p50, p90, "v", p10, p99, bucket)]
    assert predictions([ITEM], predict_response(predicted, "v")) == predicted


@pytest.mark.parametrize("tokens", [(5, 4, 6, 7), (1, 4, 3, 7), (1, 2, 3, 2), (1, 2, 3, MAX_REQUEST_TOKENS + 1)])
def test_a_poisoned_prediction_is_an_error_of_the_predictor(tokens: tuple[int, ...]) -> None:
    p10, p50, p90, p99 = tokens
    with pytest.raises(PeerError, match="p99"):
        predictions([ITEM], predict_response([Prediction("r", p50, p90, "v", p10, p99)], "v"))


@pytest.mark.parametrize("poison", [-1, float("nan"), float("inf"), 1 << 40])
def test_what_is_no_number_of_tokens_is_never_sent(poison: Any) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        predict_response([Prediction("r", 1, poison, "v")], "v")


def test_an_envelope_without_a_known_message_is_an_error() -> None:
    for name, direction in DIRECTIONS.items():
        if name != "REGISTRY_TO_SCHEDULER":
            with pytest.raises(PeerError, match="unknown message"):
                direction.decode(direction.envelope())


SPEC: dict[str, Any] = {
    "runner": {"uuid": "ns.u", "incarnation": "i"}, "address": "h:1", "pool": "ns/p", "page_tokens": 16,
    "total_pages": 64, "max_sequences": 2, "max_adapters": 4, "max_rank": 8, "max_context_tokens": 1024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pool": ""}, "pool is empty"),
        ({"address": "x" * 321}, "address has 321"),
        ({"runner": {"uuid": "u"}}, "incarnation is empty"),
        ({"runner": {"uuid": "u" * 129, "incarnation": "i"}}, "uuid has 129"),
        ({"max_context_tokens": 1025}, "more than its pages hold"),
    ],
)
def test_a_specification_that_cannot_be(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        read_spec(supervisor_pb2.RunnerHello(**SPEC | fields))


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({"sequences": [{"request_id": ""}]}, "request id is empty"),
        ({"sequences": [{"request_id": "a", "epoch": {"term": MAX_TERM}}]}, "a term is"),
        ({"sequences": [{"request_id": "a", "reserved_pages": 2**32 - 1}]}, "reserved_pages is"),
        ({"adapters": [{"digest": ""}]}, "digest is empty"),
        ({"full": True, "adapters": [{"digest": "d", "error": "x" * (16 << 20)}]}, "more than"),
    ],
)
def test_a_report_that_cannot_be(report: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        read_report(supervisor_pb2.RunnerReport(**report))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"request_ids": ["a", "x" * 321], "tokens": [1, 2]}, "a request id has 321"),
        ({"request_ids": ["a"], "tokens": [1, 2]}, "1 sequences with 2 tokens"),
        ({"request_ids": ["a", "b"], "tokens": [1, 2], "token_counts": [2]}, "2 sequences with a column of 1"),
        ({"request_ids": ["a", "b"], "tokens": [1, 2], "token_counts": [2, 1]}, "2 sequences with 2 tokens"),
        ({"request_ids": ["a"], "tokens": [1], "terms": [1, 2]}, "1 sequences with a column of 2"),
        ({"request_ids": ["a"], "tokens": [1], "finish_reasons": [5]}, "finish reason 5"),
        ({"request_ids": ["a"], "tokens": [1], "doublings": [65]}, "65 doublings"),
        ({"request_ids": ["a", "b"], "tokens": [1, 2], "logprobs": [{}]}, "2 sequences with a column of 1"),
        ({"request_ids": ["a"], "tokens": [1], "accepted_draft_tokens": [1]}, "1 sequences with a column of 0"),
    ],
)
def test_a_step_that_cannot_be(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        session.RUNNER_TO_GATEWAY.decode(session.RUNNER_TO_GATEWAY.envelope(step=columns))


def entry(direction: Any, name: str) -> Callable[[Any], Any]:
    """What decodes a message of a direction that has these fields."""
    return lambda fields: direction.decode(direction.envelope(**{name: fields}))


def sampled(fields: Any) -> Any:
    return entry(session.GATEWAY_TO_RUNNER, "start")({"request_id": "r", "sampling": fields})


def limited(fields: Any) -> Any:
    return entry(scheduling.GATEWAY_TO_SCHEDULER, "limit_report")({"uses": [{"rule": {"subject": "s", **fields}}]})


def pool(fields: Any) -> Any:
    return registry.REGISTRY_TO_SCHEDULER.decode(
        scheduler_pb2.RegistryToScheduler(pools=[{"route": {"name": "ns/p"}, **fields}])
    )


def ordered(fields: Any) -> Any:
    return batch.NEW_BATCH.decode(batch_pb2.CreateBatchRequest(**fields))


def bounds(read: Any, message: dict[str, Any], **fields: Any) -> list[tuple[Any, ...]]:
    """The least and the most of each field, and what makes a value of that length, where it is no number."""
    return [(read, message, name, *bound, *(int,) * (3 - len(bound))) for name, bound in fields.items()]


def ones(count: int) -> list[int]:
    return [1] * count


def empty(count: int) -> list[dict[str, Any]]:
    return [{}] * count


def words(count: int) -> list[str]:
    return ["w"] * count


def pairs(count: int) -> dict[str, str]:
    return {str(i): "" for i in range(count)}


HELLO = entry(cluster.RUNNER_TO_SUPERVISOR, "hello")
LINE = {"batch_id": "b", "line": 1, "status": 200}
NEW_BATCH = {"input_file_id": "f", "endpoint": "e", "completion_window": "24h"}


@pytest.mark.parametrize(
    ("read", "message", "name", "least", "most", "make"),
    [
        *bounds(
            HELLO, SPEC | {"max_context_tokens": 1},
            page_tokens=(1, 1 << 16), total_pages=(1, 1 << 31), max_sequences=(1, 1 << 16), max_adapters=(1, 1 << 16),
            max_rank=(1, 1 << 16), page_bytes=(0, 1 << 40),
        ),
        *bounds(HELLO, SPEC | {"total_pages": 1 << 31}, max_context_tokens=(1, 1 << 31)),
        *bounds(
            entry(cluster.SUPERVISOR_TO_RUNNER, "registered"), {"lease_ms": 1},
            lease_ms=(1, 1 << 31), report_ms=(0, 1 << 31),
        ),
        *bounds(entry(cluster.SCHEDULER_TO_SUPERVISOR, "hello"), {}, term=(0, 2**32 - 2)),
        *bounds(
            entry(scheduling.GATEWAY_TO_SCHEDULER, "submit"), {"request_id": "r", "priority": 1},
            waited_ms=(0, 1 << 40), migrations=(0, 1 << 16),
        ),
        *bounds(
            entry(scheduling.GATEWAY_TO_SCHEDULER, "outcome_report"), {"request_id": "r"}, record=(1, 64 << 10, bytes)
        ),
        *bounds(
            lambda m: scheduling.OUTCOME.decode(common_pb2.Outcome(**m)), {"request_id": "r", "finish": 1},
            finished_unix_ms=(0, 1 << 62),
        ),
        *bounds(limited, {}, tokens_per_minute=(0, 1 << 50)),
        *bounds(pool, {}, max_runners=(0, 1 << 20)),
        *bounds(
            entry(kv_transfer.KV_FROM_SENDER, "pages"), {"request_id": "r", "pages": 1, "layers": 1, "bytes": 1},
            pages=(1, 1 << 31), layers=(1, 1 << 12), bytes=(1, 1 << 40),
        ),
        *bounds(
            entry(kv_transfer.KV_FROM_RECEIVER, "ready"), {"runner": SPEC["runner"]},
            shard_addresses=(0, 1 << 10, words),
        ),
        *bounds(entry(session.RUNNER_TO_GATEWAY, "prompt_logprobs"), {"request_id": "r"}, first=(1, 1 << 31)),
        *bounds(entry(session.RUNNER_TO_GATEWAY, "pooled_state"), {"request_id": "r"}, vector=(1, 4 << 16, bytes)),
        *bounds(
            sampled, {}, stop_token_ids=(0, 128, ones), bad_words=(0, 64, empty), allowed_token_ids=(0, 4096, ones),
            grammar=(0, 64 << 10, "x".__mul__),
        ),
        *bounds(entry(batch.GATEWAY_TO_BATCH, "hello"), {"gateway_id": "g"}, max_lines=(0, 1 << 16)),
        *bounds(
            lambda m: entry(batch.GATEWAY_TO_BATCH, "ends")({"results": [m]}), LINE,
            line=(1, 1 << 31), status=(100, 599), body=(0, 48 << 20, bytes),
        ),
        *bounds(lambda m: batch.PAGE.decode(batch_pb2.ListRequest(**m)), {}, limit=(1, 10_000)),
        *bounds(lambda m: batch.upload_part(batch_pb2.UploadFileRequest(**m)), {}, chunk=(0, 1 << 20, bytes)),
        *bounds(ordered, NEW_BATCH, metadata=(0, 16, pairs)),
        *bounds(lambda m: ordered(NEW_BATCH | {"metadata": m}), {}, key=(0, 512, "x".__mul__)),
        *bounds(
            lambda m: batch.BATCH.decode(batch_pb2.BatchJob(**m)), {"batch_id": "b", "input_file_id": "f", "status": 1},
            errors=(0, 50, empty),
        ),
        *bounds(
            lambda m: batch.RESPONSE.decode(batch_pb2.KeepResponseRequest(**m)), {"response_id": "r"},
            body=(0, 4 << 20, bytes),
        ),
        *bounds(
            lambda m: predict_items(predictor_pb2.PredictRequest(items=[m])), {}, prompt_text=(0, 1 << 16, "x".__mul__)
        ),
    ],
)  # fmt: skip
def test_a_number_and_a_length_are_taken_within_their_bounds_alone(
    read: Any, message: dict[str, Any], name: str, least: int, most: int, make: Any
) -> None:
    for value in (least, most):
        read(message | {name: make(value)})
    for value in (least - 1, most + 1):
        if value >= 0:
            with pytest.raises(PeerError, match=rf"(is|has) {value}\b"):
                read(message | {name: make(value)})


def test_what_is_unset_in_a_declared_pool_and_in_sampling_is_their_default() -> None:
    (spec,) = pool({}).pools
    assert spec == PoolSpec("ns/p")
    assert sampled({}).sampling == Sampling()


def test_columns_of_a_step_that_say_nothing_are_left_out() -> None:
    step = Step(7, [SequenceTokens(name, Epoch(1, 2), 3, (4,)) for name in "ab"])
    sent = session.RUNNER_TO_GATEWAY.encode(step)
    fields = [field.name for field, _ in sent.step.ListFields()]
    assert fields == ["iteration", "request_ids", "terms", "counters", "positions", "tokens"]
    assert plain(session.RUNNER_TO_GATEWAY.decode(sent)) == plain(step)


def test_reasons_are_cut_and_unknown_numbers_have_a_meaning() -> None:
    ended = session.RUNNER_TO_GATEWAY.envelope(ended={"request_id": "a", "reason": 99, "detail": "x" * 5_000})
    message: Any = session.RUNNER_TO_GATEWAY.decode(ended)
    assert message.reason is EndReason.INTERNAL
    assert len(message.detail) == 1_000
