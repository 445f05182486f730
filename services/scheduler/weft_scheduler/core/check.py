"""The laws that hold between two events. Each `check_*` raises AssertionError with what it found; all are O(state).

Used by tests, the simulator and the idle service; nothing here changes anything.
"""

from collections import Counter
from itertools import islice

from weft.domain.ids import BASE, NEVER
from weft.domain.request import Priority
from weft.domain.runner import Parking, RunnerRole
from weft_scheduler.core.batch_preemption import batch_victims
from weft_scheduler.core.model.request import Phase
from weft_scheduler.core.model.runner import Contact, RunnerAccount
from weft_scheduler.core.parking import place_beside
from weft_scheduler.core.policy.autoscaling.autoscaler import Contribution
from weft_scheduler.core.policy.consolidation.consolidation import MAX_CONSOLIDATIONS
from weft_scheduler.core.policy.placement.splitwise import KvDomain, domain_of
from weft_scheduler.core.pool.fleet import new_placement
from weft_scheduler.core.pool.pool import Pool
from weft_scheduler.core.state import State
from weft_scheduler.core.timers import Timer, TimerKind
from weft_scheduler.core.view import BatchView, PoolView

# Violated, a request may run twice or nowhere: what this machine knows of requests cannot be trusted.
OWNERSHIP = frozenset({"check_one_place", "check_nothing_lost", "check_epochs"})


def size(state: State) -> int:
    """Return the size that checking is proportional to: requests, adapters, runners and reported sequences."""
    runners = sum(1 + len(runner.report.sequences) for runner in state.runners.values())
    return len(state.requests) + len(state.registry.adapter_pool) + runners


def check_all(state: State) -> None:
    """Check every law."""
    check_one_place(state)
    check_nothing_lost(state)
    check_epochs(state)
    check_consolidation(state)
    check_queues(state)
    check_scheduled(state)
    check_batch_yields(state)
    check_contact(state)
    check_accounts(state)
    check_pooled(state)
    check_roles(state)
    check_placement_index(state)
    check_counts(state)
    check_adapters(state)
    check_routes(state)
    assert len(state.outcomes.outcomes) <= state.config.max_outcomes


def check_one_place(state: State) -> None:
    """Assert that a request waits in its pool's queue, or is owned by its placement's runners, or by none; never two.

    An incarnation that was lost and is back does not own the requests that its loss stopped.
    """
    owners: dict[str, list[str]] = {}
    for runner in state.runners.values():
        for request_id in runner.accounts.owned:
            owners.setdefault(request_id, []).append(runner.id.uuid)
    waiting = Counter(r.id for pool in state.pools.values() for r in (*pool.waiting.queue, *pool.waiting.batch.queue))
    for request in state.requests.values():
        runners = request.placement.runners if request.placement is not None else ()
        expected = [runner_id.uuid for runner_id in runners if state.runners.present(runner_id) is not None]
        owner_list = owners.pop(request.id, [])
        lost = request.phase is Phase.STOPPING and set(owner_list) <= set(expected)
        assert lost or sorted(owner_list) == sorted(expected), (request, "owners")
        assert waiting.pop(request.id, 0) == (request.phase is Phase.WAITING), (request, "queue")
        assert (request.placement is not None) == request.placed, (request, "placement")
    assert not owners, ("owned but unknown", owners)
    assert not waiting, ("queued but unknown", waiting)


def check_nothing_lost(state: State) -> None:
    """Assert that gateways and pools have every request exactly once, and that the gateway of an unplaced request
    submits it again.
    """
    of_gateways = Counter(r for gateway in state.gateways.values() for r in gateway.requests)
    of_pools = Counter(r for pool in state.pools.values() for ids in pool.waiting.requests.values() for r in ids)
    everything = Counter(state.requests.keys())
    assert of_gateways == everything, of_gateways - everything
    assert of_pools == everything, of_pools - everything
    for request in state.requests.values():
        if request.phase is Phase.UNPLACED:
            assert not state.gateways[request.gateway].complete, (request, "unplaced without a reason")


def check_epochs(state: State) -> None:
    """Assert that this machine gave every epoch, and that each request has a different epoch."""
    epochs = [r.epoch for r in state.requests.values() if r.epoch != NEVER]
    assert all(epoch <= (state.numbers.term, state.numbers.counter) for epoch in epochs), max(epochs)
    current_epochs = [epoch for epoch in epochs if epoch.term == state.numbers.term]
    assert len(current_epochs) == len(set(current_epochs)), "two requests under one epoch"


def check_consolidation(state: State) -> None:
    """Assert that consolidation has migrated every request within its bound."""
    for request in state.requests.values():
        assert request.history.consolidations <= MAX_CONSOLIDATIONS, request
        assert request.reservation.stays == (request.reservation.preemptions >= state.config.max_preemptions), request


def check_queues(state: State) -> None:
    """Assert the order of the policy, and that no request was overtaken more often than the bound."""
    queues = [
        (pool, waiting, overtaking)
        for pool in state.pools.values()
        for waiting, overtaking in (
            (pool.waiting.queue, pool.waiting.overtaking),
            (pool.waiting.batch.queue, pool.waiting.batch.overtaking),
        )
    ]
    for pool, waiting, overtaking in queues:
        counters = waiting.counters
        assert all(request.batch == (waiting is pool.waiting.batch.queue) for request in waiting), (
            pool.name,
            "priorities",
        )
        tenants = [*waiting.tenants()]
        assert [counters.key_of(t) for t in tenants] == sorted(counters.key_of(t) for t in tenants), pool.name
        assert {*tenants} == {request.tenant for request in waiting}, (pool.name, tenants)
        assert counters.waiting_weight == sum(counters.weight(t) for t in tenants), pool.name
        for tenant in tenants:
            of_tenant = [*waiting.of_tenant(tenant)]
            assert all(request.tenant == tenant for request in of_tenant), (pool.name, tenant)
            keys = [waiting.key_of(request) for request in of_tenant]
            assert keys == sorted(keys), (pool.name, tenant, keys)
            oldest = waiting.oldest(tenant, len(of_tenant))
            assert [r.order for r in oldest] == sorted(r.order for r in of_tenant), (pool.name, oldest)
        counts, bound = overtaking.counts, state.config.starvation_bound
        assert all(count <= bound for count in counts.values()), (pool.name, counts)
        assert {r for r, count in counts.items() if count} <= {r.id for r in waiting}, (pool.name, counts)


def check_scheduled(state: State) -> None:
    """Assert that no waiting request could be placed now. A request skipped by a pass as unchanged must be blocked."""
    due = state.timers.next()
    if due is not None and due <= state.now:
        return
    for pool in state.pools.values():
        batch = not len(pool.waiting.queue)
        view = (BatchView if batch else PoolView)(state, pool, None)
        dry_pass = view.begin_pass((pool.waiting.batch.overtaking if batch else pool.waiting.overtaking).copy())
        for offer in dry_pass.offers():
            choice = view.place(offer.request, dry_pass.closed)
            assert choice is None, (pool.name, (offer.request.id, choice.uuid))
            assert place_beside(state, pool, view, offer.request) is None, (pool.name, offer.request)
            dry_pass.tried(offer.request, placed=False)
            if offer.drains:
                dry_pass.close(view.placeable_shapes(offer.request))


def check_batch_yields(state: State) -> None:
    """Assert that batch requests hold no capacity needed by a waiting interactive request: they are ordered off.

    Asked again, the choice of who leaves and who gets the room is the same.
    """
    due = state.timers.next()
    if due is not None and due <= state.now:
        return
    for pool in state.pools.values():
        if pool.waiting.batch.running and len(pool.waiting.queue):
            view, waiting = PoolView(state, pool, ()), islice(pool.waiting.queue, state.config.window)
            victims, claims = batch_victims(state, pool, waiting, view.could_run)
            assert not victims, (pool.name, victims)
            assert claims == pool.waiting.claims.by_request, (pool.name, claims, pool.waiting.claims.by_request)


def check_contact(state: State) -> None:
    """Assert that each reported runner has a supervisor, and that reports of a lost supervisor count for a bounded
    time.
    """
    for runner in state.runners.values():
        assert runner.contact is not Contact.PRESENT or runner.supervisor in state.supervisors, runner.id
        timer = Timer(TimerKind.RUNNER_LAPSED, runner.id.uuid)
        assert (timer in state.timers) == (runner.contact is Contact.LAPSED), (runner.id, runner.contact)
        checks = [gateway.id for gateway in state.gateways.values() if runner.id in gateway.checks]
        assert not checks or Timer(TimerKind.RUNNER_CHECKED, runner.id.uuid) in state.timers, (runner.id, checks)


def check_accounts(state: State) -> None:
    """Assert that a runner's unacknowledged Assigns are of its requests, and its busy slots of its sequences."""
    for runner in state.runners.values():
        accounts = runner.accounts
        assert accounts.unacked_pages == sum(a.pages + a.adapter_pages for a in accounts.unacked.values()), runner.id
        assert accounts.unacked_prompt_tokens == sum(a.prompt_tokens for a in accounts.unacked.values()), runner.id
        for request_id, assign in accounts.unacked.items():
            assert request_id in accounts.owned, (runner.id, request_id)
            assert assign.epoch == state.requests[request_id].epoch, (runner.id, request_id)
        used = Counter(s.adapter for s in runner.report.sequences.values()) + Counter(
            a.adapter for a in accounts.unacked.values()
        )
        del used[BASE]
        batch = {r for r, s in runner.report.sequences.items() if s.priority is Priority.BATCH}
        batch |= {r for r, a in accounts.unacked.items() if a.batch}
        assert accounts.batch.keys() == batch, (runner.id, accounts.batch, batch)
        assert accounts.batch_pages == sum(accounts.batch.values()), runner.id
        assert accounts.active == dict(used), (runner.id, accounts.active, used)
        parks = {r for a in accounts.unacked.values() for r in a.parks} & runner.report.sequences.keys()
        parks |= {r for r, s in runner.report.sequences.items() if s.parking is Parking.PARKED}
        assert accounts.parked.ids.keys() == parks, (runner.id, accounts.parked.ids, parks)


def check_pooled(state: State) -> None:
    """Assert that the expected use of a runner is the sum over exactly its sequences."""
    for runner in state.runners.values():
        if runner.accounts.pooled is None:
            continue
        runner.accounts.pooled.check()
        for request_id, member in runner.accounts.pooled.members.items():
            assign, sequence = runner.accounts.unacked.get(request_id), runner.report.sequences.get(request_id)
            assert assign or sequence, (runner.id, request_id)
            pages = assign.pages if assign is not None else sequence.reserved_pages if sequence is not None else 0
            assert member.held_pages == pages, (runner.id, request_id)
    for request in state.requests.values():
        runner = state.runners.present(request.runner)
        if request.reservation.forecast is not None and runner is not None and runner.spec is not None:
            is_known = request.id in runner.accounts.unacked or runner.report.includes(request.id, request.epoch)
            members = runner.accounts.pooled.members if runner.accounts.pooled is not None else {}
            assert not is_known or request.id in members, (runner.id, request.id)


def check_roles(state: State) -> None:
    """Assert that runners have the roles of the plan, with runners of each phase in domains of several runners."""
    for pool in state.pools.values():
        if pool.fleet.roles_stale:
            continue
        split, sides = pool.declared.split, dict[KvDomain, set[RunnerRole]]()
        for runner in pool.fleet.runners.values():
            expected = pool.scaling.roles.role_of(runner.id.uuid) if split else RunnerRole.MIXED
            assert runner.role is expected, (pool.name, runner.id, runner.role, expected)
            if runner.counted.accepting is not None:
                domain = domain_of(runner.shape, pool.declared.kv_across_classes)
                sides.setdefault(domain, set()).add(runner.role)
        for domain, roles in sides.items():
            assert RunnerRole.MIXED in roles or len(roles) > 1, (pool.name, domain, roles)
            assert domain.kv_layout or roles == {RunnerRole.MIXED}, (pool.name, domain, roles)


def check_placement_index(state: State) -> None:
    """Assert that each runner is indexed by its free pages and working set, and that indexed runners are placeable."""
    for pool in state.pools.values():
        afresh = new_placement(pool.declared)
        for runner in pool.fleet.runners.values():
            if (load := pool.fleet.load_of(runner)) is not None:
                afresh.update(load)
        indexed, expected = pool.fleet.placement.entries(), afresh.entries()
        assert indexed == expected, (pool.name, indexed.items() ^ expected.items())


def check_counts(state: State) -> None:
    """Assert that the counters equal a fresh count."""
    for pool in state.pools.values():
        requests = [state.requests[r] for r in pool.waiting.request_ids()]
        assert pool.waiting.running == sum(r.placed for r in requests), pool.name
        assert pool.waiting.batch.running == sum(r.placed for r in requests if r.batch), pool.name
        assert pool.waiting.batch.total == sum(r.batch for r in requests), pool.name
        shares, interactive = pool.waiting.shares, [r for r in requests if not r.batch]
        assert shares.weight == sum(pool.waiting.queue.counters.weight(tenant) for tenant in shares.tenants), pool.name
        running = [r for r in interactive if r.placed and r.id not in shares.parked]
        assert shares.parked <= {r.id for r in interactive if r.placed}, pool.name
        assert {t: len(ids) for t, ids in shares.running.items()} == Counter(r.tenant for r in running), pool.name
        assert {r for ids in shares.running.values() for r in ids} == {r.id for r in running}, pool.name
        assert shares.running_requests == len(running), pool.name
        assert dict(shares.tenants) == dict(Counter(r.tenant for r in interactive)), pool.name
        assert all(state.requests[r].adapter == a for a, ids in pool.waiting.requests.items() for r in ids), pool.name
        waiting = list(pool.waiting.queue)
        assert dict(pool.waiting.queued_by_adapter) == dict(Counter(r.adapter for r in waiting)), pool.name
        assert pool.waiting.queued_work == sum(r.waiting.work for r in waiting), pool.name
        assert pool.waiting.queued_prompt_tokens == sum(r.tokens.prompt for r in waiting), pool.name
        assert pool.waiting.queued_tokens == sum(r.waiting.tokens for r in waiting), pool.name
        _check_runners(pool, [*pool.fleet.runners.values()])
    for gateway in state.gateways.values():
        assert gateway.pools == Counter(state.requests[r].pool for r in gateway.requests), gateway.id


def _check_runners(pool: Pool, runners: list[RunnerAccount]) -> None:
    """Assert that the sums equal the runners' contributions, and that exactly victims are closed to requests."""
    contributions = [r.counted.contribution for r in runners if r.counted.contribution is not None]
    assert [r.counted.contribution for r in runners] == [r.contributes(pool.adapters.pinned) for r in runners], (
        pool.name
    )
    capacity = pool.fleet.capacity
    assert capacity.runners == len(contributions), pool.name
    assert capacity.sum == (Contribution(*map(sum, zip(*contributions, strict=True)))), pool.name
    cordoned = {r.id.uuid for r in runners if r.cordoned}
    assert cordoned == {*pool.scaling.autoscaler.victims} & pool.fleet.runners.keys(), (pool.name, cordoned)
    left = pool.waiting.batch.headroom.sequences
    specs = [(r, r.spec.max_sequences) for r in runners if r.spec is not None]
    crowded = {
        r.id.uuid
        for r, max_sequences in specs
        if r.accounts.working_set + min(left, max_sequences // 2) >= max_sequences
    }
    assert crowded == pool.fleet.crowded & pool.fleet.runners.keys(), (pool.name, crowded ^ pool.fleet.crowded)
    batch_runners = {r.id.uuid for r in runners if r.accounts.batch}
    assert batch_runners == pool.fleet.batch_runners.keys() & pool.fleet.runners.keys(), (pool.name, batch_runners)
    assert [*pool.fleet.draining] == [
        uuid for uuid in pool.fleet.draining if pool.fleet.runners[uuid].report.figures.draining
    ], pool.name
    assert len(pool.fleet.draining) == sum(r.report.figures.draining for r in runners), pool.name
    for counted, shapes in (
        (pool.fleet.confirmed_shapes, [r.shape for r in runners if r.contact]),
        (pool.fleet.accepting, [(r.role, r.shape) for r in runners if r.counted.contribution and not r.cordoned]),
        (pool.fleet.ready.shapes, [r.shape for r in runners if r.ready_version is not None]),
        (pool.fleet.ready.pages, [r.spec.total_pages for r in runners if r.ready_version is not None and r.spec]),
        (
            pool.fleet.ready.draft_checks,
            [r.spec.checks_drafts for r in runners if r.ready_version is not None and r.spec],
        ),
    ):
        assert dict(counted) == dict(Counter(shapes)), (pool.name, counted, shapes)
    ready = [r.ready_version for r in runners if r.ready_version is not None]
    assert dict(pool.fleet.ready.versions) == dict(Counter(ready)), pool.name
    assert pool.fleet.ready.count == len(ready), pool.name
    failures = {(d, r.id.uuid): e for r in runners for d, e in r.report.errors.items()}
    assert {(d, u): e for d, errors in pool.fleet.load_failures.items() for u, e in errors.items()} == failures, (
        pool.name
    )


def check_adapters(state: State) -> None:
    """Assert that used adapters are known, and that the adapters to hold are published. Valid once the registry is
    known.
    """
    by_uid = {uid: pool.name for pool in state.pools.values() for uid in pool.adapters.by_uid}
    assert state.registry.adapter_pool == by_uid, (state.registry.adapter_pool, by_uid)
    specs = (spec for pool in state.pools.values() for spec in pool.adapters.by_uid.values())
    canaries = {spec.uid: (spec.digest, spec.canary.digest) for spec in specs if spec.canary}
    assert canaries == {uid: (stable, counts.digest) for uid, (stable, counts) in state.registry.canaries.items()}, (
        "canaries"
    )
    if not state.registry.is_known:
        return
    for pool in state.pools.values():
        adapters = pool.adapters
        for digest in pool.waiting.requests:
            assert adapters.knows(digest), (pool.name, digest)
        published = {content.digest for spec in adapters.by_uid.values() for content in spec.contents if content.held}
        assert adapters.published.keys() == published == adapters.held_since.keys(), pool.name
        versions = [*adapters.held_since.values()]
        assert versions == sorted(versions), (pool.name, versions)
        assert adapters.pinned == tuple(sorted(d for d, a in adapters.published.items() if a.pinned)), pool.name


def check_routes(state: State) -> None:
    """Assert that each published name belongs to a served adapter of the registry, or to the base of a pool."""
    for route in state.routes.book.routes.values():
        if route.uid in state.registry.adapter_pool:
            spec = state.pools[state.registry.adapter_pool[route.uid]].adapters.by_uid[route.uid]
            assert (spec.model_name, spec.digest) == (route.model_name, route.digest), route
        else:
            assert route.uid == f"pool:{route.pool}", route
