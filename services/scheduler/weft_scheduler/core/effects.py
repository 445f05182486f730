"""The orders of the machine beside `Send` and `Close`, and what it reports for logs and metrics.

A shell performs effects in order: a term must be durable before what follows it.
"""

from dataclasses import dataclass
from typing import Literal

from weft.domain.ids import RunnerId
from weft.domain.machine import Close, Closed, Connected, PersistTerm, Received, Send, Tick


@dataclass(frozen=True, slots=True)
class Queued:
    """For logs and metrics: the request waits."""

    request_id: str
    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """For logs and metrics: an epoch is over and the request waits again."""

    request_id: str
    pool: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """For logs and metrics: a request that has tokens was placed again, in the same numerics class or another."""

    request_id: str
    pool: str
    runner: RunnerId
    from_class: str
    to_class: str


@dataclass(frozen=True, slots=True)
class KvHandOff:
    """For logs and metrics: KV went from one runner to another. `result`: of its numerics class, or "lost"."""

    request_id: str
    pool: str
    result: Literal["same", "across", "lost"]


@dataclass(frozen=True, slots=True)
class KvMigration:
    """For logs and metrics: a running request is assigned to another runner, and takes its KV along."""

    request_id: str
    pool: str
    runner: RunnerId
    reason: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """For logs and metrics: a runner is wanted in another role, for runners that came or went, or for the load."""

    pool: str
    runner: RunnerId
    role: str
    reason: str


@dataclass(frozen=True, slots=True)
class Consolidated:
    """These requests are ordered off a lightly loaded runner. For logs and metrics."""

    pool: str
    runner: RunnerId
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchPreempted:
    """Batch requests are ordered off a runner for waiting interactive requests. For logs and metrics."""

    pool: str
    runner: RunnerId
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SequencesParked:
    """Sequences of a tenant above its share are parked for a request of a tenant within its share. For logs and
    metrics.
    """

    pool: str
    runner: RunnerId
    request_id: str
    parks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """For metrics: a request of a pool with objectives has finished, within them or not."""

    pool: str
    ttft_met: bool
    token_time_met: bool


@dataclass(frozen=True, slots=True)
class Stale:
    """An event without effect, because it is outdated. For logs and metrics."""

    event: str
    subject: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunnerDoubted:
    """Gateways are asked about a runner without a reporting supervisor. For logs."""

    runner: RunnerId
    reason: str


@dataclass(frozen=True, slots=True)
class RunnerLost:
    """For logs: an incarnation is over."""

    runner: RunnerId
    reason: str


Event = Connected | Received | Closed | Tick
Effect = (
    Send
    | Close
    | PersistTerm
    | Queued
    | Requeued
    | Resumed
    | KvHandOff
    | KvMigration
    | RoleChanged
    | Consolidated
    | BatchPreempted
    | SequencesParked
    | Judged
    | Stale
    | RunnerDoubted
    | RunnerLost
)
