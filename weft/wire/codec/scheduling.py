"""Gateway <-> scheduler: one stream for each gateway. And the record of an outcome."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError

from weft.domain.fleet import MAX_LISTED_ADAPTERS, MAX_LISTED_RUNNERS, MIN_LISTED, FleetQuery, FleetReport
from weft.domain.limits import LimitReport, LimitRule
from weft.domain.request import (
    Assign,
    Cancel,
    Failed,
    GatewayHello,
    Outcome,
    OutcomeAck,
    OutcomeReport,
    Preempt,
    Reject,
    ResubmitComplete,
    RunnerChecked,
    RunnerGone,
    Started,
    Submit,
)
from weft.domain.routes import KeyScope, ResyncRoutes, Routes, RoutesApplied
from weft.wire.codec.direction import Direction
from weft.wire.codec.pairs import Pair, numbers
from weft.wire.codec.values import check_number
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb

KEY_SCOPES = numbers(KeyScope, spb.KeyScope.DESCRIPTOR)
KEY_SCOPE: Mapping[KeyScope, Any] = {scope: number for number, scope in KEY_SCOPES.items()}
OUTCOME = Pair(Outcome, common_pb2.Outcome)
LIMIT_RULE = Pair(LimitRule, spb.LimitRule)


def outcome_bytes(outcome: Outcome) -> bytes:
    """Encode the record of an outcome."""
    return OUTCOME.encode(outcome).SerializeToString()


def outcome_from_bytes(record: bytes) -> Outcome:
    """Read the record of an outcome. Raises PeerError."""
    try:
        m = common_pb2.Outcome.FromString(record)
    except DecodeError as error:
        raise PeerError(f"expected the record of an outcome, got other bytes: {error}") from error
    return OUTCOME.decode(m)


def _check_fleet(fleet: FleetReport) -> None:
    max_adapters = MAX_LISTED_ADAPTERS + MAX_LISTED_RUNNERS * MIN_LISTED
    check_number(
        sum([len(runner.adapters) for runner in fleet.runners]), "the number of adapters on runners", max_adapters
    )


GatewayMessage = (
    GatewayHello
    | ResubmitComplete
    | Submit
    | Failed
    | Cancel
    | Started
    | OutcomeReport
    | ResyncRoutes
    | RoutesApplied
    | LimitReport
    | FleetQuery
    | RunnerChecked
)
SchedulerMessage = Assign | Preempt | Reject | Routes | OutcomeAck | RunnerGone | LimitReport | FleetReport

GATEWAY_TO_SCHEDULER: Direction[pb.GatewayToScheduler, GatewayMessage] = Direction(
    pb.GatewayToScheduler,
    "gateway",
    hello=GatewayHello,
    resubmit_complete=ResubmitComplete,
    submit=Submit,
    failed=Failed,
    cancel=Cancel,
    started=Started,
    outcome_report=OutcomeReport,
    resync_routes=ResyncRoutes,
    routes_applied=RoutesApplied,
    limit_report=LimitReport,
    fleet_query=FleetQuery,
    runner_checked=RunnerChecked,
)
SCHEDULER_TO_GATEWAY: Direction[pb.SchedulerToGateway, SchedulerMessage] = Direction(
    pb.SchedulerToGateway,
    "scheduler",
    assign=Assign,
    preempt=Preempt,
    reject=Reject,
    routes=Routes,
    outcome_ack=OutcomeAck,
    runner_gone=RunnerGone,
    limit_report=LimitReport,
    fleet=Pair(FleetReport, pb.Fleet, check=_check_fleet),
)
