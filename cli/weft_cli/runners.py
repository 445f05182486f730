"""Runners and keys, from the supervisor's Admin service. gRPC is imported only here, when it is needed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.domain.runner import RunnerBook
from weft_cli.errors import BadInput, CommandError

TIMEOUT_S = 10.0
ADMIN_HINT = "--tls-dir names a folder with tls.crt, tls.key and ca.crt, the certificate with the role admin"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate of an admin, as PEM."""

    ca: bytes
    key: bytes = field(repr=False)
    certificate: bytes


@dataclass(frozen=True, slots=True)
class SupervisorClient:
    """The place of the Admin service: each supervisor knows its own runners, any of them keys, limits and usage.

    Without a certificate it is spoken to in plain text.
    """

    addresses: tuple[str, ...]
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class Residency:
    """The tier of one adapter on a runner."""

    digest: str
    tier: str
    running: int
    loading: bool
    error: str
    shortfall: str = ""  # why it is held lower than it should be


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures measured by a runner at its start."""

    best_batch: int  # sequences; 0: it was told not to measure
    step_ms_1: float
    step_ms_best: float
    prefill_tokens_per_s: float

    def __str__(self) -> str:
        if not self.best_batch:
            return "not measured"
        return (
            f"best at {self.best_batch} sequences, {self.step_ms_best:.3g} ms a token (alone {self.step_ms_1:.3g} ms); "
            f"prompts at {self.prefill_tokens_per_s:,.0f} tokens/s"
        )


def head_of(uuid: str) -> str:
    """Shorten a runner's uuid to its distinct part, without its namespace at the beginning."""
    return _own_part(uuid)[:8]


def _own_part(uuid: str) -> str:
    return uuid.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """A runner as its supervisor knows it."""

    uuid: str
    name: str
    pool: str
    ready: bool
    draining: bool
    sequences: int
    max_sequences: int
    used_pages: int
    total_pages: int
    address: str
    numerics_class: str
    role: str
    pending_prompt_tokens: int
    max_adapters: int
    adapters: tuple[Residency, ...]
    measured: Measured
    message: dict[str, Any]  # everything, as JSON

    @property
    def called(self) -> str:
        """Return the runner's name, such as its pod's, or the head of its uuid without a name."""
        return self.name or head_of(self.uuid)

    def is_called(self, text: str) -> bool:
        """Whether somebody means it: by its name, or by the head of its uuid."""
        return text in (self.name, self.uuid) or _own_part(self.uuid).startswith(text)

    def row(self) -> tuple[str, ...]:
        """Make the row of a runner in `weft get runners`."""
        on_device = sum(adapter.tier == "device" for adapter in self.adapters)
        return (
            self.called,
            self.pool,
            "Draining" if self.draining else str(self.ready),
            f"{self.sequences}/{self.max_sequences}",
            f"{self.used_pages}/{self.total_pages}",
            str(on_device),
            self.role,
            self.address,
        )


def certificate_from(folder: Path | None) -> Certificate | None:
    """Read the certificate of a folder; None without one. Raises BadInput."""
    from weft.process import CannotStart
    from weft.wire.tls import load_tls

    try:
        tls = load_tls(folder, "admin")
    except CannotStart as error:
        raise BadInput(str(error), ADMIN_HINT) from error
    files = tls.present() if tls else None
    return files and Certificate(files.ca, files.key, files.certificate)


def list_runners(supervisor: SupervisorClient) -> list[RunnerRow]:
    """List every runner with a lease, by pool. Raises CommandError."""
    from google.protobuf.json_format import MessageToDict

    supervisors = [
        _runner(book, {**MessageToDict(message.report), "runner": MessageToDict(message.spec)})
        for message, book in _reported(supervisor)
    ]
    return sorted(supervisors, key=lambda runner: (runner.pool, runner.uuid))


def books(supervisor: SupervisorClient) -> list[RunnerBook]:
    """Read the state of every runner with a lease. Raises CommandError."""
    return [book for _, book in _reported(supervisor)]


def _reported(supervisor: SupervisorClient) -> list[tuple[Any, RunnerBook]]:
    from weft.wire.codec.cluster import REPORTED
    from weft.wire.v1 import supervisor_pb2 as pb

    def listed(admin: Any) -> Any:
        return admin.ListRunners(pb.ListRunnersRequest(), timeout=TIMEOUT_S)

    answers = [_ask_at(address, supervisor.certificate, listed) for address in supervisor.addresses]
    return [(message, RunnerBook.of_report(REPORTED.read(message))) for answer in answers for message in answer.runners]


def ask(supervisor: SupervisorClient, call: Callable[[Any], Any]) -> Any:
    """Make a call of the Admin service. Raises CommandError, BadInput for a value refused by the supervisor."""
    return _ask_at(supervisor.addresses[0], supervisor.certificate, call)


def _ask_at(address: str, certificate: Certificate | None, call: Callable[[Any], Any]) -> Any:
    import grpc

    from weft.wire.v1.supervisor_pb2_grpc import AdminStub

    refused = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
    try:
        with _channel(address, certificate) as channel:
            return call(AdminStub(channel))
    except grpc.RpcError as error:
        message = str(error.details() if isinstance(error, grpc.Call) else error)
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise BadInput(message) from error
        if isinstance(error, grpc.Call) and error.code() in refused:
            raise CommandError(f"the supervisor at {address} refuses: {message}", ADMIN_HINT) from error
        hint = ADMIN_HINT if certificate else "`weft logs supervisor`"
        raise CommandError(f"the supervisor at {address} does not answer: {message}", hint) from error


def _channel(address: str, certificate: Certificate | None) -> Any:
    import grpc

    from weft.wire.roles import dns_name

    if certificate is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(certificate.ca, certificate.key, certificate.certificate)
    name = (("grpc.ssl_target_name_override", dns_name("supervisor")),)
    return grpc.secure_channel(address, credentials, options=name)


def _runner(book: RunnerBook, message: dict[str, Any]) -> RunnerRow:
    spec, figures = book.spec, book.figures
    return RunnerRow(
        uuid=spec.runner.uuid,
        name=spec.name,
        pool=spec.pool,
        ready=figures.ready,
        draining=figures.draining,
        sequences=len(book.sequences),
        max_sequences=spec.max_sequences,
        used_pages=figures.used_pages,
        total_pages=spec.total_pages,
        address=spec.address,
        numerics_class=spec.numerics_class,
        role=figures.role.value,
        pending_prompt_tokens=figures.pending_prompt_tokens,
        max_adapters=spec.max_adapters,
        adapters=tuple(
            Residency(a.digest, a.tier.name.lower(), a.running, a.loading, a.error, a.shortfall)
            for a in sorted(book.adapters.values(), key=lambda a: (-a.tier, a.digest))
        ),
        measured=Measured(spec.best_batch, spec.step_ms_1, spec.step_ms_best, spec.prefill_tokens_per_s),
        message=message,
    )
