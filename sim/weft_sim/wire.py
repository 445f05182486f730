"""The shipped codec as the network uses it: a contract for each pair of kinds."""

from typing import Any

from google.protobuf.message import DecodeError

from weft.domain.machine import Kind
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import Outcome, OutcomeAck
from weft.wire.codec import cluster, registry, scheduling, session
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
        """Raises PeerError."""
        (item,) = predict_items(envelope)
        return item


class _PredictAnswer:
    """Its answer."""

    envelope = predictor_pb2.PredictResponse

    def encode(self, message: Prediction) -> predictor_pb2.PredictResponse:
        return predict_response((message,), message.model_version)

    def decode(self, envelope: predictor_pb2.PredictResponse) -> Prediction:
        """Raises PeerError."""
        asked = [PredictItem(item.request_id, "", "", "", 0, 0) for item in envelope.items]
        return predictions(asked, envelope)[0]


class _Observe:
    """An outcome on its way from the store to the predictor."""

    envelope = predictor_pb2.ObserveRequest

    def encode(self, message: Outcome) -> predictor_pb2.ObserveRequest:
        return predictor_pb2.ObserveRequest(outcomes=[common_pb2.Outcome.FromString(outcome_bytes(message))])

    def decode(self, envelope: predictor_pb2.ObserveRequest) -> Outcome:
        """Raises PeerError."""
        (outcome,) = observed(envelope)
        return outcome


class _ObserveAck:
    """It is learned."""

    envelope = predictor_pb2.ObserveAck

    def encode(self, message: OutcomeAck) -> predictor_pb2.ObserveAck:
        return predictor_pb2.ObserveAck(request_ids=message.request_ids)

    def decode(self, envelope: predictor_pb2.ObserveAck) -> OutcomeAck:
        return OutcomeAck(tuple(envelope.request_ids))


CONTRACTS[Kind.GATEWAY, Kind.PREDICTOR] = _PredictCall()
CONTRACTS[Kind.PREDICTOR, Kind.GATEWAY] = _PredictAnswer()
CONTRACTS[Kind.SUPERVISOR, Kind.PREDICTOR] = _Observe()
CONTRACTS[Kind.PREDICTOR, Kind.SUPERVISOR] = _ObserveAck()


class WireCodec:
    """Domain message -> protobuf bytes -> domain message, as between two processes."""

    def encode(self, sender: Kind, receiver: Kind, message: object) -> bytes:
        return CONTRACTS[sender, receiver].encode(message).SerializeToString()

    def decode(self, sender: Kind, receiver: Kind, data: bytes) -> object:
        """Raises PeerError."""
        direction = CONTRACTS[sender, receiver]
        try:
            envelope = direction.envelope.FromString(data)
        except DecodeError as error:
            raise PeerError(f"a {sender.value} sent bytes that are no message: {error}") from None
        return direction.decode(envelope)
