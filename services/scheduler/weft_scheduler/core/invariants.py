"""What always holds between two events. Each `check_*` raises AssertionError with what it found; all are O(state).

Used by tests, simulations and the idle service; nothing here changes anything.
"""

from collections import Counter

from weft.identities import NEVER
from weft_scheduler.core import room
from weft_scheduler.core.context import Context, placeable
from weft_scheduler.core.ranking import Key
from weft_scheduler.core.shelves import Shape
from weft_scheduler.core.state import OWNED, Phase, Pool, Runner, State
from weft_scheduler.core.totals import Share

# Violated, a request may run twice or nowhere: what this machine knows of requests cannot be trusted.
OWNERSHIP = frozenset({"check_one_place", "check_nothing_lost", "check_epochs"})


def size(state: State) -> int:
    """What checking costs is linear in it: requests, adapters, runners and the sequences that these have reported."""
    runners = sum(1 + len(runner.included) for runner in state.runners.values())
    return len(state.requests) + len(state.adapter_pool) + runners


def check_all(ctx: Context) -> None:
    """Every law."""
    state = ctx.state
    check_one_place(state)
    check_nothing_lost(state)
    check_epochs(state)
    check_queues(state, ctx.config.starvation_bound)
    check_room(state)
    check_shelves(state)
    check_counts(state)
    check_desired(state)
    assert len(ctx.outcomes.kept) <= ctx.config.max_outcomes


def check_one_place(state: State) -> None:
    """A request waits in its pool's queue, or is owned by one runner, or is held back; never two of these."""
    owners: dict[str, list[str]] = {}
    for runner in state.runners.values():
        for request_id in runner.owned:
            owners.setdefault(request_id, []).append(runner.id.uuid)
    waiting = Counter(r.id for pool in state.pools.values() for r in pool.queue)
    for request in state.requests.values():
        runner = state.runner(request.runner)
        expected = [runner.id.uuid] if runner is not None and request.phase in OWNED else []
        assert owners.pop(request.id, []) == expected, (request, "owners")
        assert waiting.pop(request.id, 0) == (request.phase is Phase.WAITING), (request, "queue")
        assert (request.runner is not None) == (request.phase in OWNED), (request, "runner")
    assert not owners, ("owned but unknown", owners)
    assert not waiting, ("queued but unknown", waiting)


def check_nothing_lost(state: State) -> None:
    """Gateways' requests and pools' requests are all requests, each once; a held one's gateway is re-submitting."""
    of_gateways = Counter(r for gateway in state.gateways.values() for r in gateway.requests)
    of_pools = Counter(r for pool in state.pools.values() for r in pool.requests)
    everything = Counter(state.requests.keys())
    assert of_gateways == everything, of_gateways - everything
    assert of_pools == everything, of_pools - everything
    for request in state.requests.values():
        if request.phase is Phase.HELD:
            assert not state.gateways[request.gateway].complete, (request, "held without a reason")


def check_epochs(state: State) -> None:
    """No epoch is above what this machine has given; no two requests run under one."""
    epochs = [r.epoch for r in state.requests.values() if r.epoch != NEVER]
    assert all(epoch <= (state.term, state.counter) for epoch in epochs), max(epochs)
    given = [epoch for epoch in epochs if epoch.term == state.term]
    assert len(given) == len(set(given)), "two requests under one epoch"


def check_queues(state: State, bound: int) -> None:
    """First come, first served; nobody was passed more often than the bound."""
    for pool in state.pools.values():
        orders = [request.order for request in pool.queue]
        assert orders == sorted(orders), (pool.name, orders)
        assert all(request.passes <= bound for request in pool.queue), pool.name


def check_room(state: State) -> None:
    """A runner's pending accounts are those of the Assigns it owns, and its busy slots those of its sequences."""
    for runner in state.runners.values():
        assert runner.pending_pages == sum(p.pages for p in runner.pending.values()), runner.id
        for request_id, pending in runner.pending.items():
            assert request_id in runner.owned, (runner.id, request_id)
            assert pending.epoch == state.requests[request_id].epoch, (runner.id, request_id)
        reported = runner.report.sequences if runner.report is not None else ()
        digests = Counter(s.digest for s in reported) + Counter(p.digest for p in runner.pending.values())
        del digests[""]
        assert runner.active == dict(digests), (runner.id, runner.active, digests)


def check_shelves(state: State) -> None:
    """A runner stands exactly where its room and working set say; what is shelved is placeable."""
    for pool in state.pools.values():
        shelved: dict[str, tuple[Shape, Key, int]] = {}
        for shape, shelf in pool.shelves.by_shape.items():
            for key, free in shelf.open:
                assert key.uuid not in shelved
                shelved[key.uuid] = (shape, key, free)
            for key, free in shelf.full.get("", ()):
                assert key.uuid not in shelved
                shelved[key.uuid] = (shape, key, free)
        expected = {uuid: entry for uuid in pool.runners if (entry := _entry(state.runners[uuid])) is not None}
        assert shelved == expected, (pool.name, shelved, expected)


def _entry(runner: Runner) -> tuple[Shape, Key, int] | None:
    if not placeable(runner) or runner.spec is None:
        return None
    assert room.working_set(runner) >= 0
    working_set = room.working_set(runner)
    if working_set >= runner.spec.max_sequences or not room.free_tokens(runner):
        return None
    key = Key(room.preference(working_set, runner.spec.good_sequences), runner.id.uuid)
    return runner.shape, key, room.free_tokens(runner)


def check_counts(state: State) -> None:
    """Counters are what counting gives."""
    for pool in state.pools.values():
        requests = [state.requests[r] for r in pool.requests]
        assert pool.running == sum(r.phase in OWNED for r in requests), pool.name
        assert dict(pool.live) == dict(Counter(r.digest for r in requests)), pool.name
        runners = [state.runners[uuid] for uuid in pool.runners]
        ready = Counter(r.ready_version for r in runners if r.ready_version is not None)
        assert dict(pool.ready_versions) == dict(ready), pool.name
        waiting = list(pool.queue)
        assert dict(pool.waiting) == dict(Counter(r.digest for r in waiting)), pool.name
        assert pool.waiting_tokens == sum(r.waiting_tokens for r in waiting), pool.name
        _check_totals(pool, runners)
        _check_members(pool, runners)


def _check_totals(pool: Pool, runners: list[Runner]) -> None:
    """The sums are the runners' shares; victims are runners that take nothing new, and nobody else is."""
    shares = [r.share for r in runners if r.share is not None]
    assert [r.share for r in runners] == [room.share_of(pool, r) for r in runners], pool.name
    assert pool.totals.runners == len(shares), pool.name
    assert pool.totals.sum == Share(*map(sum, zip(*shares, strict=True))), pool.name
    takers = Counter(r.shape for r in runners if r.share is not None and not r.cordoned)
    assert dict(pool.takers) == dict(takers), (pool.name, pool.takers, takers)
    cordoned = {r.id.uuid for r in runners if r.cordoned}
    assert cordoned == {*pool.victims} & pool.runners, (pool.name, cordoned, pool.victims)


def _check_members(pool: Pool, runners: list[Runner]) -> None:
    members = Counter(r.shape for r in runners if r.confirmed)
    assert {s: shelf.members for s, shelf in pool.shelves.by_shape.items()} == dict(members), pool.name
    ready = Counter(r.shape for r in runners if r.ready_version is not None)
    assert {s: shelf.ready for s, shelf in pool.shelves.by_shape.items() if shelf.ready} == dict(ready), pool.name


def check_desired(state: State) -> None:
    """Once the registry is known: what requests use is on their pool's list, and the list is what was published."""
    by_uid = {uid: pool.name for pool in state.pools.values() for uid in pool.adapters}
    assert state.adapter_pool == by_uid, (state.adapter_pool, by_uid)
    if not state.registry_known:
        return
    for pool in state.pools.values():
        for digest in pool.live:
            assert pool.desired.knows(digest), (pool.name, digest)
        if pool.spec is not None:
            published = {a.digest for a in pool.desired.list.adapters}
            assert published >= set(pool.desired.registered), pool.name
