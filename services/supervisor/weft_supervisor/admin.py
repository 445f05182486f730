"""The Admin service: keys, limits, usage and runners, for the command."""

import asyncio
import logging
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from weft.domain.bounds import MAX_MODEL_CHARS
from weft.domain.limits import LimitRule
from weft.domain.routes import KeyRoute, KeyScope, limits_entry
from weft.domain.runner import ReportedRunner
from weft.store import declared_keys, keys, limits, usage
from weft.store.access_mark import AccessMark, access_mark
from weft.store.errors import StoreError
from weft.telemetry.logs import kv
from weft.wire.codec.cluster import REPORTED
from weft.wire.codec.scheduling import KEY_SCOPE, KEY_SCOPES, LIMIT_RULE
from weft.wire.errors import PeerError
from weft.wire.v1 import supervisor_pb2 as pb
from weft.wire.v1.supervisor_pb2_grpc import AdminServicer
from weft_supervisor.server import SupervisorServer

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_LISTED_BYTES = 16 << 20  # runners' bytes in an answer; a gRPC message takes 64 MiB
MAX_MODELS = 64  # per key
MAX_OWNER = 128
HASH = re.compile(r"[0-9a-f]{64}")
LAST_EXPIRY = 1 << 53  # Unix milliseconds; JSON readers hold integers exactly up to here
EPOCH = date(1970, 1, 1)
LAST_DAY = 1_000_000  # since 1970
MAX_USAGE_ROWS = 50_000  # of an answer: some 5 MB
NO_OWNER = f"owner is not the uid of an object, of 1 to {MAX_OWNER} characters"
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a Kubernetes namespace: an RFC 1123 label


class AdminServer(AdminServicer):
    """The Admin service, on the store and the core. Sends the scheduler a changed key before it answers."""

    def __init__(self, engine: AsyncEngine, supervisor: SupervisorServer) -> None:
        self._engine, self._supervisor = engine, supervisor
        self._sending = asyncio.Lock()  # keeps the lists in the order of their reading
        self._sent: object = None  # the mark of the keys sent last
        self._limits: tuple[object, list[LimitRule]] = None, []  # the limits read last, with their mark

    async def CreateKey(self, request: pb.CreateKeyRequest, context: "Context") -> pb.CreateKeyResponse:
        try:
            grant = _grant(request, _now())
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        new = await self._change(context, keys.create(self._engine, grant, request.note, now_unix_ms=_now()))
        return pb.CreateKeyResponse(key=new.key, key_id=new.key_id)

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: "Context") -> pb.RevokeKeyResponse:
        existed = await self._change(context, keys.revoke(self._engine, request.key_id, now_unix_ms=_now()))
        return pb.RevokeKeyResponse(existed=existed)

    async def ListKeys(self, request: pb.ListKeysRequest, context: "Context") -> pb.ListKeysResponse:
        response = pb.ListKeysResponse()
        for key in await _read(context, keys.all_keys(self._engine)):
            response.keys.add(
                key_id=key.key_id,
                namespace=key.grant.namespace,
                note=key.note,
                created_unix_s=key.created_unix_ms // 1000,
                revoked=key.revoked_unix_ms is not None,
                scope=KEY_SCOPE[key.grant.scope],
                models=key.grant.models,
                expires_unix_ms=key.grant.expires_unix_ms,
            )
        return response

    async def DeclareKey(self, request: pb.KeyDeclaration, context: "Context") -> pb.DeclareKeyResponse:
        try:
            new = _declaration(request)
        except (PeerError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        changed = await self._change(context, declared_keys.declare(self._engine, new, now_unix_ms=_now()))
        if isinstance(changed, declared_keys.Refusal):
            return pb.DeclareKeyResponse(outcome=changed.name)
        return pb.DeclareKeyResponse(outcome=pb.DeclareKeyResponse.DECLARED, key_id=changed.key_id)

    async def WithdrawKey(self, request: pb.WithdrawKeyRequest, context: "Context") -> pb.WithdrawKeyResponse:
        if not request.owner:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_OWNER)
        await self._change(context, declared_keys.withdraw(self._engine, request.owner, now_unix_ms=_now()))
        return pb.WithdrawKeyResponse()

    async def ListDeclaredKeys(
        self, request: pb.ListDeclaredKeysRequest, context: "Context"
    ) -> pb.ListDeclaredKeysResponse:
        response = pb.ListDeclaredKeysResponse()
        for key in await _read(context, declared_keys.all_declared(self._engine)):
            grant, declaration = key.declaration.grant, key.declaration
            m = response.keys.add(key_id=key.key_id, revoked=key.revoked)
            m.declaration.owner, m.declaration.namespace = declaration.owner, grant.namespace
            m.declaration.note, m.declaration.key_hash = declaration.note, declaration.key_hash
            m.declaration.scope, m.declaration.expires_unix_ms = KEY_SCOPE[grant.scope], grant.expires_unix_ms
            m.declaration.models.extend(grant.models)
            LIMIT_RULE.fill(declaration.limits, m.declaration.limits)
        return response

    async def SetLimit(self, request: pb.LimitRule, context: "Context") -> pb.SetLimitResponse:
        try:
            rule = _checked(LIMIT_RULE.read(request))
        except (PeerError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._change(context, limits.put(self._engine, rule, now_unix_ms=_now()))
        return pb.SetLimitResponse()

    async def ListLimits(self, request: pb.ListLimitsRequest, context: "Context") -> pb.ListLimitsResponse:
        response = pb.ListLimitsResponse()
        for rule in await _read(context, self._rules()):
            LIMIT_RULE.fill(rule, response.limits.add())
        return response

    async def GetUsage(self, request: pb.GetUsageRequest, context: "Context") -> pb.GetUsageResponse:
        """Answer with at most MAX_USAGE_ROWS rows, the oldest days first."""
        first_day = EPOCH + timedelta(days=min(request.since_day, LAST_DAY))
        max_rows = MAX_USAGE_ROWS + 1
        query = usage.since(
            self._engine, first_day, namespace=request.namespace, by_key=request.by_key, max_rows=max_rows
        )
        rows = await _read(context, query)
        response = pb.GetUsageResponse(more=len(rows) > MAX_USAGE_ROWS)
        for row in rows[:MAX_USAGE_ROWS]:
            response.rows.add(
                day=(row.day - EPOCH).days,
                namespace=row.namespace,
                model_name=row.model_name,
                requests=row.requests,
                prompt_tokens=row.prompt_tokens,
                completion_tokens=row.completion_tokens,
                key_id=row.key_id,
            )
        return response

    async def ListRunners(self, request: pb.ListRunnersRequest, context: "Context") -> pb.ListRunnersResponse:
        """Answer with full reports of the runners, by id, up to the size of a message."""
        core, size = self._supervisor.core, 0
        grown, preempts, doublings, _ = core.counters()
        response = pb.ListRunnersResponse(grows=grown, preempts=preempts, doublings=doublings)
        for book in core.live():
            REPORTED.fill(ReportedRunner(book.spec.runner, book.full(), book.spec), response.runners.add())
            if (size := size + response.runners[-1].ByteSize()) > MAX_LISTED_BYTES:
                del response.runners[-1]
                log.warning("runners do not fit in a list", extra=kv(listed=len(response.runners)))
                break
        return response

    async def _change(self, context: "Context", change: Awaitable[T]) -> T:
        """Await a change of the store, then send the scheduler the new keys."""
        async with _available(context):
            changed = await change
            await self.send_keys()
        return changed

    async def send_keys(self) -> None:
        """Send the scheduler all keys in force."""
        async with self._sending:
            mark = await self._mark()  # read first: a change during the send then causes another send
            in_force = [key for key in await keys.all_keys(self._engine) if key.in_force(_now())]
            rules = defaultdict[str, list[LimitRule]](list)
            for rule in await self._rules():
                rules[rule.subject].append(rule)
            of_namespaces = [
                KeyRoute(name, "", "", limits=tuple(limits)) for name, limits in rules.items() if _is_entry(name)
            ]
            routes = (*(_route(key, rules) for key in in_force), *of_namespaces)
            self._supervisor.set_keys(routes, version=1 + mark[0].keys)
            self._sent = mark

    async def _mark(self) -> tuple[AccessMark, object]:
        """Read the mark of keys and limits, then the spent quotas. Equal marks mean equal keys."""
        mark = await access_mark(self._engine)
        if mark.limits != self._limits[0]:
            self._limits = mark.limits, await limits.all_rules(self._engine)
        return mark, [rule for rule in await self._with_spent(self._limits[1]) if rule.spent_until_unix_ms]

    async def _rules(self) -> list[LimitRule]:
        """List every limit. Mark the limits without tokens left today, by the stored outcomes."""
        return await self._with_spent(await limits.all_rules(self._engine))

    async def _with_spent(self, rules: list[LimitRule]) -> list[LimitRule]:
        if not any(rule.tokens_per_day for rule in rules):
            return rules
        today, daily = datetime.now(UTC).date(), [rule for rule in rules if rule.tokens_per_day]
        by_model = {_name_of(rule) for rule in daily if rule.model and not _is_of_key(rule)}
        used = {
            f"namespace/{name}": tokens for name, tokens in (await usage.tokens(self._engine, today, by_model)).items()
        }
        if of_keys := {_name_of(rule) for rule in daily if _is_of_key(rule)}:
            key_tokens = await usage.tokens_of_keys(self._engine, today, of_keys)
            used |= {f"key/{key_id}": tokens for key_id, tokens in key_tokens.items()}
        return with_spent(rules, used, today)

    async def follow_keys(self, every_s: float) -> None:
        """Send the scheduler the changes of other supervisors and the spent quotas, or confirm the keys sent last.

        If the store is out of reach, the next round reads it again.
        """
        reached = True
        while True:
            await asyncio.sleep(every_s)
            try:
                if await self._mark() != self._sent:
                    await self.send_keys()
                else:
                    self._supervisor.confirm_keys()
                reached = True
            except (StoreError, SQLAlchemyError) as error:
                if reached:
                    log.warning("keys of other supervisors are not known now", extra=kv(error=error))
                reached = False


def _grant(request: pb.CreateKeyRequest, now_unix_ms: int) -> keys.Grant:
    """Read the rights of a new key. Raises ValueError with a sentence for the caller."""
    scope = KEY_SCOPES.get(request.scope)
    if scope is None:
        raise ValueError(f"scope {request.scope} is not known to this supervisor")
    platform = scope is KeyScope.PLATFORM
    if platform and (request.namespace or request.models):
        raise ValueError("a platform key has neither a namespace nor models")
    if not platform and not NAMESPACE.fullmatch(request.namespace):
        raise ValueError(f"namespace {request.namespace!r} is not a DNS label")
    models = tuple(request.models)
    if len(models) > MAX_MODELS or not all(0 < len(model) <= MAX_MODEL_CHARS for model in models):
        raise ValueError(f"a key has at most {MAX_MODELS} models, each of 1 to {MAX_MODEL_CHARS} characters")
    if request.expires_unix_ms and not now_unix_ms < request.expires_unix_ms < LAST_EXPIRY:
        raise ValueError("a key expires in the future, or never")
    return keys.Grant(request.namespace, scope, models, request.expires_unix_ms)


def _declaration(m: pb.KeyDeclaration) -> declared_keys.Declaration:
    """Read the declaration of an owner. Raises ValueError and PeerError with a sentence for the caller."""
    if not 0 < len(m.owner) <= MAX_OWNER:
        raise ValueError(NO_OWNER)
    if m.scope == pb.KEY_SCOPE_PLATFORM:
        raise ValueError("an object of a namespace declares no key of the platform")
    if not HASH.fullmatch(m.key_hash):
        raise ValueError("key_hash is not the SHA-256 of a key, in hex")
    reply = pb.CreateKeyRequest(
        namespace=m.namespace, scope=m.scope, models=m.models, expires_unix_ms=m.expires_unix_ms
    )
    rule = pb.LimitRule()
    rule.CopyFrom(m.limits)
    rule.subject, rule.model = f"key/{m.key_hash[:8]}", declared_keys.EVERY_MODEL
    return declared_keys.Declaration(m.owner, m.key_hash, _grant(reply, _now()), m.note, LIMIT_RULE.read(rule))


def _route(key: keys.ApiKey, rules: Mapping[str, Sequence[LimitRule]]) -> KeyRoute:
    """Make the route table's entry of a key. `rules`: by subject."""
    grant = key.grant
    mine = (*rules.get(f"key/{key.key_id}", ()), *rules.get(f"namespace/{grant.namespace}", ()))
    return KeyRoute(key.key_hash, grant.namespace, key.key_id, grant.scope, grant.models, grant.expires_unix_ms, mine)


def _is_entry(subject: str) -> bool:
    """Whether the subject of limits is a namespace, and so names its entry in the route table."""
    return subject == limits_entry(subject.removeprefix("namespace/"))


def _checked(rule: LimitRule) -> LimitRule:
    """Check the subject of a rule. Raises ValueError with a sentence for the caller."""
    kind, _, name = rule.subject.partition("/")
    if kind not in ("key", "namespace") or not NAMESPACE.fullmatch(name):
        raise ValueError(f"{rule.subject!r} is neither key/ID nor namespace/NAME")
    return replace(rule, spent_until_unix_ms=0)


def with_spent(rules: Iterable[LimitRule], used: Mapping[str, Mapping[str, int]], today: date) -> list[LimitRule]:
    """Mark the rules without tokens left today, until the day's end.

    `used`: tokens by subject and model; "": the sum over all models.
    """
    end_ms = 1000 * 86_400 * (today - EPOCH + timedelta(days=1)).days

    def spent(rule: LimitRule) -> bool:
        if not rule.tokens_per_day:
            return False
        mine = used.get(rule.subject, {})
        of_models = (count for model, count in mine.items() if model and fnmatchcase(model, rule.model))
        return (sum(of_models) if rule.model else mine.get("", 0)) >= rule.tokens_per_day

    return [replace(rule, spent_until_unix_ms=end_ms) if spent(rule) else rule for rule in rules]


def _name_of(rule: LimitRule) -> str:
    """Return the name of the rule's namespace, or the id of its key."""
    return rule.subject.partition("/")[2]


def _is_of_key(rule: LimitRule) -> bool:
    return rule.subject.startswith("key/")


@asynccontextmanager
async def _available(context: "Context") -> AsyncGenerator[None, None]:
    """Answer UNAVAILABLE with the reason while the store is out of reach."""
    try:
        yield
    except (StoreError, SQLAlchemyError) as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"store: {error}")


async def _read(context: "Context", action: Awaitable[T]) -> T:
    """Await a query of the store. Abort the call if it fails."""
    async with _available(context):
        return await action


def _now() -> int:
    return time.time_ns() // 1_000_000
