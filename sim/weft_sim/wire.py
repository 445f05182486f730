"""The shipped codec as the network uses it: a contract for each pair of kinds."""

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from weft.domain.machine import Kind
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome, OutcomeAck
from weft.wire.codec import cluster, kv_transfer, registry, scheduling, session
from weft.wire.codec.kv_transfer import KvPages
from weft.wire.codec.prediction import observed, predict_items, predict_request, predict_response, predictions
from weft.wire.codec.scheduling import outcome_bytes
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2, predictor_pb2

CONTRACTS: dict[tuple[Kind, Kind], Any] = {
    (Kind.GATEWAY, Kind.SCHEDULER): scheduling.GATEWAY_TO_SCHEDULER,
    (Kind.SCHEDULER, Kind.GATEWAY): scheduling.SCHEDULER_TO_GATEWAY,
    (Kind.GATEWAY, Kind.RUNNER): session.GATEWAY_TO_RUNNER,
    (Kind.RUNNER, Kind.GATEWAY): session.RUNNER_TO_GATEWAY,
    (Kind.RUNNER, Kind.SUPERVISOR): cluster.RUNNER_TO_SUPERVISOR,
    (Kind.SUPERVISOR, Kind.RUNNER): cluster.SUPERVISOR_TO_RUNNER,
    (Kind.SUPERVISOR, Kind.SCHEDULER): cluster.SUPERVISOR_TO_SCHEDULER,
    (Kind.SCHEDULER, Kind.SUPERVISOR): cluster.SCHEDULER_TO_SUPERVISOR,
    (Kind.REGISTRY, Kind.SCHEDULER): registry.REGISTRY_TO_SCHEDULER,
    (Kind.SCHEDULER, Kind.REGISTRY): registry.SCHEDULER_TO_REGISTRY,
}


class _PredictCall:
    """A call of the predictor with one item."""

    envelope = predictor_pb2.PredictRequest

    def encode(self, message: PredictItem) -> predictor_pb2.PredictRequest:
        return predict_request((message,))

    def decode(self, envelope: predictor_pb2.PredictRequest) -> PredictItem:
        """Decode a call. Raises PeerError."""
        (item,) = predict_items(envelope)
        return item


class _PredictAnswer:
    """The predictor's answer to a call."""

    envelope = predictor_pb2.PredictResponse

    def encode(self, message: Prediction) -> predictor_pb2.PredictResponse:
        return predict_response((message,), message.model_version)

    def decode(self, envelope: predictor_pb2.PredictResponse) -> Prediction:
        """Decode an answer. Raises PeerError."""
        items = [PredictItem(item.request_id, "", "", "", 0, 0) for item in envelope.items]
        return predictions(items, envelope)[0]


class _Observe:
    """An outcome on its way from the store to the predictor."""

    envelope = predictor_pb2.ObserveRequest

    def encode(self, message: Outcome) -> predictor_pb2.ObserveRequest:
        return predictor_pb2.ObserveRequest(outcomes=[common_pb2.Outcome.FromString(outcome_bytes(message))])

    def decode(self, envelope: predictor_pb2.ObserveRequest) -> Outcome:
        """Decode an outcome. Raises PeerError."""
        (outcome,) = observed(envelope)
        return outcome


class _ObserveAck:
    """The predictor's acknowledgement of a learned outcome."""

    envelope = predictor_pb2.ObserveAck

    def encode(self, message: OutcomeAck) -> predictor_pb2.ObserveAck:
        return predictor_pb2.ObserveAck(request_ids=message.request_ids)

    def decode(self, envelope: predictor_pb2.ObserveAck) -> OutcomeAck:
        return OutcomeAck(tuple(envelope.request_ids))


CONTRACTS[Kind.GATEWAY, Kind.PREDICTOR] = _PredictCall()
CONTRACTS[Kind.PREDICTOR, Kind.GATEWAY] = _PredictAnswer()
CONTRACTS[Kind.SUPERVISOR, Kind.PREDICTOR] = _Observe()
CONTRACTS[Kind.PREDICTOR, Kind.SUPERVISOR] = _ObserveAck()


class KvPayload(NamedTuple):
    """Pages in transit between two runners: their announcement and their contents."""

    pages: KvPages
    data: bytes


def _encode_kv(message: Any) -> bytes:
    """Encode a message between runners: its direction, its length and the contents of pages."""
    envelope, data = (message.pages, message.data) if isinstance(message, KvPayload) else (message, b"")
    from_sender = type(envelope) in kv_transfer.KV_FROM_SENDER.messages
    direction: Any = kv_transfer.KV_FROM_SENDER if from_sender else kv_transfer.KV_FROM_RECEIVER
    body = direction.encode(envelope).SerializeToString()
    return bytes((from_sender,)) + len(body).to_bytes(4, "big") + body + data


def _decode_kv(data: bytes) -> object:
    """Decode a message between runners. Raises PeerError."""
    direction: Any = kv_transfer.KV_FROM_SENDER if data[:1] == b"\x01" else kv_transfer.KV_FROM_RECEIVER
    end = 5 + int.from_bytes(data[1:5], "big")
    message = direction.decode(direction.envelope.FromString(data[5:end]))
    if isinstance(message, KvPages):
        if len(data) != end + message.bytes:
            raise PeerError(f"{len(data) - end} bytes of pages where {message.bytes} were announced")
        return KvPayload(message, data[end:])
    return message


class WireCodec:
    """Domain message -> protobuf bytes -> domain message, as between two processes."""

    def encode(self, sender: Kind, receiver: Kind, message: object) -> bytes:
        if sender is receiver is Kind.RUNNER:
            return _encode_kv(message)
        return CONTRACTS[sender, receiver].encode(message).SerializeToString()

    def decode(self, sender: Kind, receiver: Kind, data: bytes) -> object:
        """Decode a message as its receiver does. Raises PeerError."""
        try:
            if sender is receiver is Kind.RUNNER:
                return _decode_kv(data)
            direction = CONTRACTS[sender, receiver]
            envelope = direction.envelope.FromString(data)
        except DecodeError as error:
            raise PeerError(f"a {sender.value} sent bytes that are no message: {error}") from None
        return direction.decode(envelope)
