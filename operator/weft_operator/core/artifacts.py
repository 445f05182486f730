"""The depot's answers about a source over time, and the digests for the depot to keep.

A source is resolved again and again: this is how an edited folder is noticed, and an unchanged source costs the depot
little. A resolution keeps three facts apart: the newest finished answer, whether a request is under way, and the last
*good* answer. Only the last good answer may be served. Conditions show the newest answer; they do not flap while it is
requested again.

Streams of a replaced or deleted digest finish on it within its pool's drain time. So a digest removed from the registry
stays retained for the drain time. The ledger is memory only. After a restart the draining digests are unknown, so
nothing is dropped before the longest drain time has passed.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from weft.artifacts.depot_api import CONFIG_MAP, OperationStatus, ResolveRequest, Verdict
from weft.domain.routes import AdapterSpec
from weft_operator.core.resources import Ref

MAX_FAILURE_PAUSE_S = 10.0
MAX_UNREACHABLE_PAUSE_S = 60.0
MAX_REMOTE_PAUSE_S = 600.0  # after failures of a source on a remote server
MAX_CREDENTIALS_PAUSE_S = 60.0  # if a Secret or ConfigMap may be wrong: no event reports its correction
CREDENTIALS_REASONS = ("SecretMissing", "SecretForbidden", "SecretInvalid", "SourceForbidden", "SourceNotFound")
MAX_PAUSE_DOUBLINGS = 10  # of a pause: any bound is reached before
WATCHED_S = 3600.0  # between two full reads of a source with a watch at the depot
JITTER = 0.1  # of every pause before a remote source is asked: requests to the same host spread out


@dataclass(frozen=True, slots=True)
class VerifiedArtifact:
    """A content that passed every check, and the inputs of the checks."""

    digest: str
    verdict: Verdict
    pool: Ref | None = None  # of an adapter
    base_digest: str | None = None
    version: str | None = None  # its published name


@dataclass(frozen=True, slots=True)
class Resolution:
    """The resolution of an object's source. Times are of the clock of `now`."""

    request: ResolveRequest
    answer: OperationStatus = field(default_factory=OperationStatus)
    running: bool = False
    started_at: float | None = None  # when this was first asked; None: not in this process
    finished_at: float | None = None  # None: never in this process
    failures: int = 0  # in a row
    verified: VerifiedArtifact | None = None

    def due_at(self, period_s: float, poll_s: float = inf) -> float:
        """Return the time to ask again: at a fixed pace, or after failures at a slower, bounded pace.

        A remote source in order is asked for every `poll_s`, if it can change. Its watch reports a lost content.
        """
        if self.finished_at is None:
            return -inf
        if self.failures == 0:
            if self.request.fixed:
                return inf
            if self.request.remote:
                return self.finished_at + jittered(self.request, poll_s)
            return self.finished_at + (max(period_s, WATCHED_S) if self.answer.watch else period_s)
        most_s = MAX_UNREACHABLE_PAUSE_S if self.answer.reason == "SourceUnreachable" else MAX_FAILURE_PAUSE_S
        most_s = MAX_REMOTE_PAUSE_S if self.request.remote else most_s
        of_secret = self.request.credentials is not None and self.answer.reason in CREDENTIALS_REASONS
        if of_cluster := of_secret or self.request.uri.startswith(CONFIG_MAP):
            most_s = MAX_CREDENTIALS_PAUSE_S
        pause_s = min(period_s * 2 ** min(self.failures - 1, MAX_PAUSE_DOUBLINGS), most_s)
        pause_s = max(pause_s, period_s)  # never more often than a source in order
        if self.request.remote:
            pause_s = jittered(self.request, max(pause_s, self.answer.retry_after_s / (1 - JITTER)))
            pause_s = pause_s / (1 + JITTER) if of_cluster else pause_s  # at most, not on average
        return self.finished_at + pause_s


def jittered(request: ResolveRequest, pause_s: float) -> float:
    """Vary a pause between sources. The same source always gets the same pause."""
    share = zlib.crc32(f"{request.namespace} {request.uri} {request.revision}".encode()) / (1 << 32)
    return pause_s * (1 - JITTER + 2 * JITTER * share)


def started(previous: Resolution | None, request: ResolveRequest, now: float) -> Resolution:
    """Record a running request to the depot. The same request keeps its answer until the new answer is complete."""
    if previous is not None and previous.request == request:
        return replace(previous, running=True)
    return Resolution(request, running=True, started_at=now, verified=previous.verified if previous else None)


def updated(previous: Resolution, answer: OperationStatus, now: float, pool: Ref | None = None) -> Resolution:
    """Take in the depot's answer to the request under way. Steps on the way to a repeated answer are not news."""
    if not answer.finished:
        return previous if previous.answer.finished else replace(previous, answer=answer)
    if answer.state == "Failed":
        return replace(previous, answer=answer, running=False, finished_at=now, failures=previous.failures + 1)
    started = previous.request
    verified = VerifiedArtifact(answer.digest or "", answer.verdict or {}, pool, started.base_digest, started.version)
    return replace(previous, answer=answer, running=False, finished_at=now, failures=0, verified=verified)


def source_changed(previous: Resolution) -> Resolution:
    """Note a changed source or a lost content: it is due again."""
    return replace(previous, answer=replace(previous.answer, watch=None), finished_at=None)


def unreachable(previous: Resolution, now: float) -> Resolution:
    """Note that the depot did not answer. The known answer stays; only the next attempt is later."""
    return replace(previous, running=False, finished_at=now, failures=previous.failures + 1)


def from_status(
    request: ResolveRequest, status: Mapping[str, Any], generation: int, pool: Ref | None, now: float
) -> Resolution | None:
    """Restore the resolution implied by an object's status, for a controller at its start.

    So a restarted controller publishes the served content at once, and writes nothing while nothing has changed. A
    remote source in order is not read again: the depot is only asked whether it still holds the content. The spec may
    have changed while no controller was running. Then the older status still gives the serving content until the new
    source is known, and nothing about the present source.
    """
    is_old = status.get("observedGeneration") != generation
    verified = _verified(request, status, pool, is_old=is_old)
    if is_old:
        return Resolution(request, verified=verified) if verified else None
    fetched = next((c for c in status.get("conditions", ()) if c["type"] == "Fetched"), None)
    if fetched is None or fetched["status"] == "Unknown":
        return Resolution(request, verified=verified) if verified else None
    if fetched["status"] == "True" and verified and request.watched_by_digest:
        answer = OperationStatus("Fetched", verified.digest, status, watch=verified.digest)
        return Resolution(request, answer, finished_at=now, verified=verified)
    if fetched["status"] == "True":
        return Resolution(
            request, OperationStatus("Fetched", verified.digest if verified else None, status), verified=verified
        )
    validated = any(c["type"] == "Validated" and c["status"] == "True" for c in status["conditions"])
    failed = OperationStatus("Failed", None, status if validated else None, fetched["reason"], fetched["message"])
    return Resolution(request, failed, verified=verified)


def served_content(status: Mapping[str, Any]) -> VerifiedArtifact | None:
    """Return the content in an adapter's status, for the pool and the base in the status."""
    digest, namespaced = status.get("digest"), str(status.get("pool") or "")
    if not digest or not namespaced:
        return None
    namespace, _, name = namespaced.partition("/")
    version = next((v.get("name") for v in status.get("versions", ()) if v["digest"] == digest), None)
    return VerifiedArtifact(digest, status, Ref("ServingPool", namespace, name), status.get("baseDigest"), version)


def _verified(
    request: ResolveRequest, status: Mapping[str, Any], pool: Ref | None, *, is_old: bool
) -> VerifiedArtifact | None:
    """Return the content in a status. `pool`: the adapter's present pool, which may differ from the checked pool."""
    if request.kind == "model":
        digest = status.get("baseDigest")
        return VerifiedArtifact(digest, status) if digest else None
    if is_old and not status.get("pool"):
        return None
    return served_content({"pool": str(pool), "baseDigest": request.base_digest, **status})


def served_digests(entry: AdapterSpec) -> set[str]:
    """The digests of every content of an adapter as it is published, and of its chat template."""
    return {entry.digest, entry.chat_template, *(version.digest for version in entry.versions)} - {""}


@dataclass(slots=True)
class Retention:
    """A ledger of draining digests, and of the last list sent to the depot. Times are the clock of `now`."""

    started_at: float = 0.0
    kept_until: dict[str, float] = field(default_factory=dict)
    last_sent: frozenset[str] | None = None  # the last complete list accepted by the depot

    def left(self, digest: str, now: float, drain_s: float) -> None:
        """Note that a digest has left the registry: its streams may run for `drain_s` more."""
        self.kept_until[digest] = max(self.kept_until.get(digest, now), now + drain_s)

    def forget(self, now: float) -> None:
        """Drop the digests whose streams have drained."""
        for digest in [digest for digest, kept_until in self.kept_until.items() if kept_until <= now]:
            del self.kept_until[digest]

    def retained_digests(self, live: Iterable[str], now: float) -> frozenset[str]:
        """Return the complete list to keep: all live and all draining digests."""
        return frozenset(live) | {digest for digest, kept_until in self.kept_until.items() if kept_until > now}

    def due_at(self, longest_drain_s: float) -> float | None:
        """Return the next time at which the list may shrink; None: nothing drains, and the depot has the list."""
        first = self.started_at + longest_drain_s
        if self.kept_until:
            return max(first, min(self.kept_until.values()))
        return first if self.last_sent is None else None
