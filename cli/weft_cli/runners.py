"""Runners and keys, from the supervisor's Admin service. gRPC is imported only here, when it is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft_cli.client import Controller
from weft_cli.errors import BadInput, CommandError

TIMEOUT_S = 10.0
TIERS = ("?", "remote", "disk", "host", "device")


@dataclass(frozen=True, slots=True)
class Residency:
    """Where one runner has one adapter."""

    digest: str
    tier: str
    running: int
    loading: bool
    error: str


@dataclass(frozen=True, slots=True)
class Runner:
    """A runner as its supervisor knows it."""

    uuid: str
    pool: str
    ready: bool
    draining: bool
    sequences: int
    max_sequences: int
    used_pages: int
    total_pages: int
    address: str
    numerics_class: str
    max_adapters: int
    adapters: tuple[Residency, ...]
    message: dict[str, Any]  # everything, as JSON

    def row(self) -> tuple[str, ...]:
        """As `weft get runners` prints it."""
        on_device = sum(adapter.tier == "device" for adapter in self.adapters)
        return (
            self.uuid[:8],
            self.pool,
            "Draining" if self.draining else str(self.ready),
            f"{self.sequences}/{self.max_sequences}",
            f"{self.used_pages}/{self.total_pages}",
            f"{on_device}/{self.max_adapters}",
            self.address,
        )


def list_runners(controller: Controller) -> list[Runner]:
    """Every runner with a lease, by pool. Raises CommandError."""
    from google.protobuf.json_format import MessageToDict

    from weft.wire.v1 import supervisor_pb2 as pb

    answer = ask(controller, lambda admin: admin.ListRunners(pb.ListRunnersRequest(), timeout=TIMEOUT_S))
    found = [_runner(state, MessageToDict(state)) for state in answer.runners]
    return sorted(found, key=lambda runner: (runner.pool, runner.uuid))


def ask(controller: Controller, call: Callable[[Any], Any]) -> Any:
    """One call of the Admin service. Raises CommandError, BadInput for what the supervisor does not take."""
    import grpc

    from weft.wire.v1.supervisor_pb2_grpc import AdminStub

    address = controller.stack()["supervisor"]
    try:
        with grpc.insecure_channel(address) as channel:
            return call(AdminStub(channel))
    except grpc.RpcError as error:
        why = str(error.details() if isinstance(error, grpc.Call) else error)
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise BadInput(why) from error
        raise CommandError(f"the supervisor at {address} does not answer: {why}", "`weft logs supervisor`") from error


def _runner(state: Any, message: dict[str, Any]) -> Runner:
    about = state.runner
    return Runner(
        uuid=state.id.uuid,
        pool=about.pool,
        ready=state.ready,
        draining=state.draining,
        sequences=len(state.sequences),
        max_sequences=about.max_sequences,
        used_pages=state.used_pages,
        total_pages=about.total_pages,
        address=about.address,
        numerics_class=about.numerics_class,
        max_adapters=about.max_adapters,
        adapters=tuple(
            Residency(a.digest, TIERS[a.tier], a.running, a.loading, a.error)
            for a in sorted(state.adapters, key=lambda a: (-a.tier, a.digest))
        ),
        message=message,
    )
