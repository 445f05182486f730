"""Gateway <-> scheduler: one stream for each gateway. And the record of an outcome."""

from google.protobuf.message import DecodeError

from weft.domain.adapter import AdapterVersion
from weft.domain.fleet import FleetQuery, FleetReport
from weft.domain.limits import LimitReport, LimitRule, LimitUse
from weft.domain.request import (
    Assign,
    Cancel,
    Failed,
    FailReason,
    GatewayHello,
    Outcome,
    OutcomeAck,
    OutcomeReport,
    Preempt,
    Reject,
    RejectReason,
    ResubmitComplete,
    RunnerGone,
    SamplingDefaults,
    Started,
    Submit,
    TokenRunner,
)
from weft.domain.routes import KeyRoute, KeyScope, PoolRoute, ResyncRoutes, Route, Routes, RoutesApplied, Unserved
from weft.wire.codec.direction import Direction, Entry
from weft.wire.codec.fleet import fill_fleet, fleet
from weft.wire.codec.session import FINISH, FINISHED
from weft.wire.codec.values import (
    MAX_DETAIL,
    MAX_MODEL,
    MAX_PAGES,
    MAX_RANK,
    MAX_TOKENS,
    MAX_WAITED_MS,
    PRIORITY,
    enum,
    epoch,
    fill_epoch,
    fill_runner_id,
    inverted,
    named,
    number,
    priority,
    runner_id,
    same_named,
    text,
    texts,
)
from weft.wire.errors import PeerError
from weft.wire.v1 import common_pb2
from weft.wire.v1 import scheduler_pb2 as pb
from weft.wire.v1 import supervisor_pb2 as spb

MAX_RECORD = 64 << 10  # bytes of an outcome
MAX_MIGRATIONS = 1 << 16
MAX_LIMIT = 1 << 50  # of requests or tokens

_FAILED = {
    FailReason.SESSION_LOST: pb.Failed.SESSION_LOST,
    FailReason.NO_CAPACITY: pb.Failed.NO_CAPACITY,
    FailReason.PREEMPTED: pb.Failed.PREEMPTED,
    FailReason.DRAINED: pb.Failed.DRAINED,
    FailReason.LOAD_FAILED: pb.Failed.LOAD_FAILED,
    FailReason.RUNNER_ERROR: pb.Failed.RUNNER_ERROR,
    FailReason.KV_LOST: pb.Failed.KV_LOST,
}
_FAIL_REASONS = inverted(_FAILED)
_REJECTED = {
    RejectReason.QUEUE_FULL: pb.Reject.QUEUE_FULL,
    RejectReason.TOO_LARGE: pb.Reject.TOO_LARGE,
    RejectReason.UNKNOWN_POOL: pb.Reject.UNKNOWN_POOL,
    RejectReason.TOO_MANY_MIGRATIONS: pb.Reject.TOO_MANY_MIGRATIONS,
    RejectReason.ADAPTER_FAILED: pb.Reject.ADAPTER_FAILED,
    RejectReason.UNKNOWN_ADAPTER: pb.Reject.UNKNOWN_ADAPTER,
    RejectReason.SLO_UNATTAINABLE: pb.Reject.SLO_UNATTAINABLE,
}
_REJECT_REASONS = inverted(_REJECTED)
KEY_SCOPE = {
    KeyScope.INFERENCE: spb.KEY_SCOPE_INFERENCE,
    KeyScope.READ_ONLY: spb.KEY_SCOPE_READ_ONLY,
    KeyScope.METRICS: spb.KEY_SCOPE_METRICS,
    KeyScope.PLATFORM: spb.KEY_SCOPE_PLATFORM,
}
KEY_SCOPES = inverted(KEY_SCOPE)


def _fill_hello(hello: GatewayHello, m: pb.GatewayHello) -> None:
    m.gateway, m.applies_routes = hello.gateway, hello.applies_routes


def _hello(m: pb.GatewayHello) -> GatewayHello:
    return GatewayHello(named(m.gateway, "a gateway's id"), m.applies_routes)


def _fill_applied(applied: RoutesApplied, m: pb.RoutesApplied) -> None:
    m.version = applied.version


def _applied(m: pb.RoutesApplied) -> RoutesApplied:
    return RoutesApplied(m.version)


def _fill_submit(submit: Submit, m: pb.Submit) -> None:
    m.request_id, m.pool, m.namespace, m.model_name = (
        submit.request_id,
        submit.pool,
        submit.namespace,
        submit.model_name,
    )
    m.adapter = submit.adapter
    m.prompt_tokens, m.emitted_tokens, m.max_tokens = submit.prompt_tokens, submit.emitted_tokens, submit.max_tokens
    m.p10_tokens, m.p50_tokens = submit.p10_tokens, submit.p50_tokens
    m.p90_tokens, m.p99_tokens = submit.p90_tokens, submit.p99_tokens
    m.bucket_tokens = submit.bucket_tokens
    m.waited_ms = round(1000 * submit.waited_s)
    m.priority, m.traceparent, m.open_ended = PRIORITY[submit.priority], submit.traceparent, submit.open_ended
    m.migrations, m.preemptions, m.numerics_class = submit.migrations, submit.preemptions, submit.numerics_class
    if submit.runner is not None:
        fill_epoch(submit.epoch, m.epoch)
        fill_runner_id(submit.runner, m.runner)
        m.reservation_tokens, m.start_emitted_tokens = submit.reservation_tokens, submit.start_emitted_tokens
        if submit.token_runner is not None:
            fill_runner_id(submit.token_runner, m.token_runner)


def _submit(m: pb.Submit) -> Submit:
    return Submit(
        request_id=named(m.request_id, "a request id"),
        pool=text(m.pool, "a pool's name"),
        namespace=text(m.namespace, "a namespace"),
        model_name=text(m.model_name, "a model's name", MAX_MODEL),
        adapter=text(m.adapter, "an adapter's digest"),
        prompt_tokens=number(m.prompt_tokens, "prompt_tokens", MAX_TOKENS),
        max_tokens=number(m.max_tokens, "max_tokens", MAX_TOKENS),
        emitted_tokens=number(m.emitted_tokens, "emitted_tokens", MAX_TOKENS),
        p10_tokens=number(m.p10_tokens, "p10_tokens", MAX_TOKENS),
        p50_tokens=number(m.p50_tokens, "p50_tokens", MAX_TOKENS),
        p90_tokens=number(m.p90_tokens, "p90_tokens", MAX_TOKENS),
        p99_tokens=number(m.p99_tokens, "p99_tokens", MAX_TOKENS),
        bucket_tokens=number(m.bucket_tokens, "bucket_tokens", MAX_TOKENS),
        waited_s=number(m.waited_ms, "waited_ms", MAX_WAITED_MS) / 1000,
        epoch=epoch(m.epoch),
        runner=runner_id(m.runner) if m.HasField("runner") and m.runner.uuid else None,
        migrations=number(m.migrations, "migrations", MAX_MIGRATIONS),
        preemptions=number(m.preemptions, "preemptions", MAX_MIGRATIONS),
        reservation_tokens=number(m.reservation_tokens, "reservation_tokens", MAX_TOKENS),
        start_emitted_tokens=number(m.start_emitted_tokens, "start_emitted_tokens", MAX_TOKENS),
        numerics_class=text(m.numerics_class, "a numerics class", MAX_DETAIL),
        token_runner=runner_id(m.token_runner) if m.HasField("token_runner") else None,
        priority=priority(m.priority),
        traceparent=text(m.traceparent, "a trace context"),
        open_ended=m.open_ended,
    )


def _fill_failed(failed: Failed, m: pb.Failed) -> None:
    m.request_id, m.reason = failed.request_id, _FAILED[failed.reason]
    fill_epoch(failed.epoch, m.epoch)
    m.emitted_tokens, m.free_pages, m.detail = failed.emitted_tokens, failed.free_pages, failed.detail[:MAX_DETAIL]
    if failed.runner is not None:
        fill_runner_id(failed.runner, m.runner)


def _failed(m: pb.Failed) -> Failed:
    return Failed(
        named(m.request_id, "a request id"),
        epoch(m.epoch),
        enum(_FAIL_REASONS, m.reason, "the reason of a failure"),
        number(m.emitted_tokens, "emitted_tokens", MAX_TOKENS),
        number(m.free_pages, "free_pages", MAX_PAGES),
        m.detail[:MAX_DETAIL],
        runner_id(m.runner) if m.HasField("runner") else None,
    )


def _fill_cancel(cancel: Cancel, m: pb.Cancel) -> None:
    m.request_id, m.emitted_tokens = cancel.request_id, cancel.emitted_tokens


def _cancel(m: pb.Cancel) -> Cancel:
    return Cancel(named(m.request_id, "a request id"), number(m.emitted_tokens, "emitted_tokens", MAX_TOKENS))


def _fill_started(started: Started, m: pb.Started) -> None:
    m.request_id, m.handed_off = started.request_id, started.handed_off
    fill_epoch(started.epoch, m.epoch)


def _started(m: pb.Started) -> Started:
    return Started(named(m.request_id, "a request id"), epoch(m.epoch), m.handed_off)


def fill_outcome_report(report: OutcomeReport, m: pb.OutcomeReport) -> None:
    m.request_id, m.pool, m.adapter = report.request_id, report.pool, report.adapter
    m.completion_tokens, m.censored, m.record = report.completion_tokens, report.censored, report.record
    m.ttft_ms, m.total_ms = report.ttft_ms, report.total_ms
    m.model_name, m.failed = report.model_name, report.failed


def outcome_report(m: pb.OutcomeReport) -> OutcomeReport:
    """Raises PeerError."""
    number(len(m.record), "the size of an outcome", MAX_RECORD, least=1)
    return OutcomeReport(
        named(m.request_id, "a request id"),
        text(m.pool, "a pool's name"),
        text(m.adapter, "an adapter's digest"),
        number(m.completion_tokens, "completion_tokens", MAX_TOKENS),
        m.censored,
        m.record,
        number(m.ttft_ms, "ttft_ms", MAX_WAITED_MS),
        number(m.total_ms, "total_ms", MAX_WAITED_MS),
        text(m.model_name, "a model's name", MAX_MODEL),
        m.failed,
    )


def fill_outcome_ack(ack: OutcomeAck, m: pb.OutcomeAck) -> None:
    m.request_ids.extend(ack.request_ids)


def outcome_ack(m: pb.OutcomeAck) -> OutcomeAck:
    """Raises PeerError."""
    return OutcomeAck(texts(m.request_ids, "a request id"))


def outcome_bytes(outcome: Outcome) -> bytes:
    """The record of an outcome."""
    return common_pb2.Outcome(
        request_id=outcome.request_id,
        pool=outcome.pool,
        namespace=outcome.namespace,
        model_name=outcome.model_name,
        adapter=outcome.adapter,
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        finish=FINISH[outcome.finish],
        error=outcome.error,
        censored=outcome.censored,
        predicted_p50_tokens=outcome.predicted_p50_tokens,
        predicted_p90_tokens=outcome.predicted_p90_tokens,
        model_version=outcome.model_version,
        ttft_ms=outcome.ttft_ms,
        total_ms=outcome.total_ms,
        migrations=outcome.migrations,
        doublings=outcome.doublings,
        finished_unix_ms=outcome.finished_unix_ms,
        choice=outcome.choice,
        key_id=outcome.key_id,
    ).SerializeToString()


def outcome_from_bytes(record: bytes) -> Outcome:
    """Raises PeerError."""
    try:
        m = common_pb2.Outcome.FromString(record)
    except DecodeError as error:
        raise PeerError(f"the record of an outcome is none: {error}") from error
    return outcome(m)


def outcome(m: common_pb2.Outcome) -> Outcome:
    """Raises PeerError."""
    return Outcome(
        request_id=named(m.request_id, "a request id"),
        pool=text(m.pool, "a pool's name"),
        namespace=text(m.namespace, "a namespace"),
        model_name=text(m.model_name, "a model's name", MAX_MODEL),
        adapter=text(m.adapter, "an adapter's digest"),
        prompt_tokens=number(m.prompt_tokens, "prompt_tokens", MAX_TOKENS),
        completion_tokens=number(m.completion_tokens, "completion_tokens", MAX_TOKENS),
        finish=enum(FINISHED, m.finish, "a finish reason"),
        finished_unix_ms=number(m.finished_unix_ms, "finished_unix_ms", 1 << 62),
        error=text(m.error, "an error's name"),
        censored=m.censored,
        predicted_p50_tokens=number(m.predicted_p50_tokens, "predicted_p50_tokens", MAX_TOKENS),
        predicted_p90_tokens=number(m.predicted_p90_tokens, "predicted_p90_tokens", MAX_TOKENS),
        model_version=text(m.model_version, "a predictor's version"),
        ttft_ms=m.ttft_ms,
        total_ms=m.total_ms,
        migrations=number(m.migrations, "migrations", MAX_MIGRATIONS),
        doublings=number(m.doublings, "doublings", MAX_MIGRATIONS),
        choice=m.choice,
        key_id=text(m.key_id, "a key's id"),
    )


def _fill_assign(assign: Assign, m: pb.Assign) -> None:
    m.request_id, m.address, m.reservation_tokens = assign.request_id, assign.address, assign.reservation_tokens
    fill_epoch(assign.epoch, m.epoch)
    fill_runner_id(assign.runner, m.runner)
    m.numerics_class, m.rank, m.adapter_bytes = assign.numerics_class, assign.rank, assign.adapter_bytes
    m.delay_ms = round(1000 * assign.delay_s)
    m.by_page, m.leaves, m.stays = assign.by_page, assign.leaves, assign.stays
    m.kv_address = assign.kv_address
    if (second := assign.token_runner) is not None:
        fill_runner_id(second.runner, m.token_runner.runner)
        m.token_runner.address, m.token_runner.kv_address = second.address, second.kv_address
        m.token_runner.numerics_class = second.numerics_class


def _assign(m: pb.Assign) -> Assign:
    return Assign(
        request_id=named(m.request_id, "a request id"),
        epoch=epoch(m.epoch),
        runner=runner_id(m.runner),
        address=named(m.address, "a runner's address"),
        reservation_tokens=number(m.reservation_tokens, "reservation_tokens", MAX_TOKENS),
        numerics_class=text(m.numerics_class, "a numerics class", MAX_DETAIL),
        rank=number(m.rank, "an adapter's rank", MAX_RANK),
        adapter_bytes=m.adapter_bytes,
        delay_s=number(m.delay_ms, "delay_ms", MAX_WAITED_MS) / 1000,
        by_page=m.by_page,
        leaves=m.leaves,
        stays=m.stays,
        token_runner=_token_runner(m.token_runner) if m.HasField("token_runner") else None,
        kv_address=text(m.kv_address, "a KV address"),
    )


def _token_runner(m: pb.TokenRunner) -> TokenRunner:
    return TokenRunner(
        runner_id(m.runner),
        named(m.address, "a runner's address"),
        named(m.kv_address, "a KV address"),
        text(m.numerics_class, "a numerics class", MAX_DETAIL),
    )


def _fill_preempt(preempt: Preempt, m: pb.Preempt) -> None:
    m.request_id = preempt.request_id
    fill_epoch(preempt.epoch, m.epoch)


def _preempt(m: pb.Preempt) -> Preempt:
    return Preempt(named(m.request_id, "a request id"), epoch(m.epoch))


def _fill_reject(reject: Reject, m: pb.Reject) -> None:
    m.request_id, m.reason, m.message = reject.request_id, _REJECTED[reject.reason], reject.message[:MAX_DETAIL]
    m.retry_after_ms = reject.retry_after_ms


def _reject(m: pb.Reject) -> Reject:
    return Reject(
        named(m.request_id, "a request id"),
        enum(_REJECT_REASONS, m.reason, "the reason of a rejection"),
        m.message[:MAX_DETAIL],
        m.retry_after_ms,
    )


def _fill_gone(gone: RunnerGone, m: pb.RunnerGone) -> None:
    fill_runner_id(gone.runner, m.runner)


def _gone(m: pb.RunnerGone) -> RunnerGone:
    return RunnerGone(runner_id(m.runner))


def fill_routes(routes: Routes, m: pb.Routes) -> None:
    m.version, m.full, m.base_version = routes.version, routes.full, routes.base_version
    m.keys_known, m.more = routes.keys_known, routes.more
    m.removed_models.extend(routes.removed_models)
    m.removed_pools.extend(routes.removed_pools)
    m.removed_keys.extend(routes.removed_keys)
    for route in routes.routes:
        m.routes.add(
            model_name=route.model_name,
            namespace=route.namespace,
            pool=route.pool,
            adapter=route.adapter,
            rank=route.rank,
            uid=route.uid,
            created_unix_s=route.created_unix_s,
            version=route.version,
            versions=[pb.AdapterVersion(**version._asdict()) for version in route.versions],
            eos_token_ids=route.eos_token_ids,
            own_chat_template=route.own_chat_template,
            chat_template=route.chat_template,
            chat_template_fault=route.chat_template_fault,
        )
    for pool in routes.pools:
        defaults = sampling_defaults_message(pool.sampling_defaults)
        m.pools.add(sampling_defaults=defaults, **same_named(pool, "sampling_defaults"))
    for key in routes.keys:
        fill_key(key, m.keys.add())
    m.removed_unserved.extend(routes.removed_unserved)
    for one in routes.unserved:
        m.unserved.add(**same_named(one))


def _routes(m: pb.Routes) -> Routes:
    """The scheduler is trusted with the lengths of its names: the registry bounded them."""
    return Routes(
        version=m.version,
        full=m.full,
        base_version=m.base_version,
        routes=tuple(
            [
                Route(
                    r.model_name,
                    r.namespace,
                    r.pool,
                    r.adapter,
                    r.rank,
                    r.uid,
                    r.created_unix_s,
                    r.version,
                    tuple(
                        [
                            AdapterVersion(
                                v.digest, v.rank, v.bytes, v.name, v.weight, tuple(v.eos_token_ids), v.own_chat_template
                            )
                            for v in r.versions
                        ]
                    ),
                    tuple(r.eos_token_ids),
                    r.own_chat_template,
                    r.chat_template,
                    r.chat_template_fault[:MAX_DETAIL],
                )
                for r in m.routes
            ]
        ),
        removed_models=tuple(m.removed_models),
        pools=tuple(
            [
                PoolRoute(
                    p.pool,
                    p.base_digest,
                    p.base_model_name,
                    p.max_context_tokens,
                    p.ready_runners,
                    p.shared_all,
                    tuple(p.shared_namespaces),
                    p.tool_call_parser,
                    p.embeds_only,
                    p.max_output_tokens,
                    sampling_defaults(p.sampling_defaults),
                    p.chat_template,
                    p.chat_template_fault[:MAX_DETAIL],
                )
                for p in m.pools
            ]
        ),
        removed_pools=tuple(m.removed_pools),
        keys=tuple([key(k) for k in m.keys]),
        removed_keys=tuple(m.removed_keys),
        keys_known=m.keys_known,
        unserved=tuple(
            [Unserved(u.uid, u.namespace, u.model_name, u.pool, u.reason, u.message[:MAX_DETAIL]) for u in m.unserved]
        ),
        removed_unserved=tuple(m.removed_unserved),
        more=m.more,
    )


def sampling_defaults_message(defaults: SamplingDefaults) -> pb.SamplingDefaults:
    return pb.SamplingDefaults(**same_named(defaults))


def sampling_defaults(m: pb.SamplingDefaults) -> SamplingDefaults:
    return SamplingDefaults(**{field.name: value for field, value in m.ListFields()})


def fill_key(key: KeyRoute, m: pb.KeyRoute) -> None:
    m.key_hash, m.namespace, m.key_id = key.key_hash, key.namespace, key.key_id
    m.scope, m.expires_unix_ms = KEY_SCOPE[key.scope], key.expires_unix_ms
    m.models.extend(key.models)
    for one in key.limits:
        fill_rule(one, m.limits.add())


def fill_rule(rule: LimitRule, m: spb.LimitRule) -> None:
    m.subject, m.model = rule.subject, rule.model
    m.requests_per_minute, m.tokens_per_minute = rule.requests_per_minute, rule.tokens_per_minute
    m.concurrent, m.tokens_per_day = rule.concurrent, rule.tokens_per_day
    m.spent_until_unix_ms = rule.spent_until_unix_ms


def rule(m: spb.LimitRule) -> LimitRule:
    """Raises PeerError."""
    return LimitRule(
        named(m.subject, "the subject of a limit"),
        text(m.model, "the model of a limit", MAX_MODEL),
        number(m.requests_per_minute, "requests_per_minute", MAX_LIMIT),
        number(m.tokens_per_minute, "tokens_per_minute", MAX_LIMIT),
        number(m.concurrent, "concurrent", MAX_LIMIT),
        number(m.tokens_per_day, "tokens_per_day", MAX_LIMIT),
        m.spent_until_unix_ms,
    )


def _fill_limit_report(report: LimitReport, m: pb.LimitReport) -> None:
    m.gateway = report.gateway
    for use in report.uses:
        added = m.uses.add(requests=use.requests, tokens=use.tokens, concurrent=use.concurrent)
        fill_rule(use.rule, added.rule)


def _limit_report(m: pb.LimitReport) -> LimitReport:
    """Raises PeerError."""
    return LimitReport(
        text(m.gateway, "a gateway's id"),
        tuple(
            [
                LimitUse(
                    rule(use.rule),
                    number(use.requests, "requests", MAX_LIMIT, -MAX_LIMIT),
                    number(use.tokens, "tokens", MAX_LIMIT, -MAX_LIMIT),
                    number(use.concurrent, "concurrent", MAX_LIMIT),
                )
                for use in m.uses
            ]
        ),
    )


def key(m: pb.KeyRoute) -> KeyRoute:
    """Raises PeerError."""
    return KeyRoute(
        named(m.key_hash, "a key's hash"),
        text(m.namespace, "a namespace"),
        text(m.key_id, "a key's id"),
        enum(KEY_SCOPES, m.scope, "a key's scope"),
        tuple([named(model, "a key's model", MAX_MODEL) for model in m.models]),
        m.expires_unix_ms,
        tuple([rule(one) for one in m.limits]),
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
)
SchedulerMessage = Assign | Preempt | Reject | Routes | OutcomeAck | RunnerGone | LimitReport | FleetReport

GATEWAY_TO_SCHEDULER: Direction[pb.GatewayToScheduler, GatewayMessage] = Direction(
    pb.GatewayToScheduler,
    "gateway",
    Entry("hello", GatewayHello, _fill_hello, _hello),
    Entry("resubmit_complete", ResubmitComplete),
    Entry("submit", Submit, _fill_submit, _submit),
    Entry("failed", Failed, _fill_failed, _failed),
    Entry("cancel", Cancel, _fill_cancel, _cancel),
    Entry("started", Started, _fill_started, _started),
    Entry("outcome_report", OutcomeReport, fill_outcome_report, outcome_report),
    Entry("resync_routes", ResyncRoutes),
    Entry("routes_applied", RoutesApplied, _fill_applied, _applied),
    Entry("limit_report", LimitReport, _fill_limit_report, _limit_report),
    Entry("fleet_query", FleetQuery),
)
SCHEDULER_TO_GATEWAY: Direction[pb.SchedulerToGateway, SchedulerMessage] = Direction(
    pb.SchedulerToGateway,
    "scheduler",
    Entry("assign", Assign, _fill_assign, _assign),
    Entry("preempt", Preempt, _fill_preempt, _preempt),
    Entry("reject", Reject, _fill_reject, _reject),
    Entry("routes", Routes, fill_routes, _routes),
    Entry("outcome_ack", OutcomeAck, fill_outcome_ack, outcome_ack),
    Entry("runner_gone", RunnerGone, _fill_gone, _gone),
    Entry("limit_report", LimitReport, _fill_limit_report, _limit_report),
    Entry("fleet", FleetReport, fill_fleet, fleet),
)
