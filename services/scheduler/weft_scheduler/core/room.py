"""What is free on a runner: its last report minus the Assigns that are not in it yet.

A report lists the (request, epoch) pairs it includes; an Assign counts against the report until it is one of them.
Pages that paused sequences are owed are not free either: what a victim leaves goes to the overrunner first.
"""

from weft_scheduler.core.ranking import Key
from weft_scheduler.core.reservation import from_here_tokens
from weft_scheduler.core.state import Pending, Pool, Request, Runner
from weft_scheduler.core.totals import Share
from weft_scheduler.core.values import BASE, Epoch, RunnerReport


def pages_of(tokens: int, page_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_tokens)


def reserve_tokens(request: Request) -> int:
    """Output tokens to reserve from here on."""
    return from_here_tokens(request.cover_tokens, request.emitted_tokens, request.max_tokens)


def room_tokens(request: Request) -> int:
    """Tokens its pages have to hold: prompt, emitted, reservation."""
    return request.prompt_tokens + request.emitted_tokens + reserve_tokens(request)


def free_pages(runner: Runner) -> int:
    """Pages an Assign may count on; never negative."""
    if runner.report is None:
        return 0
    return max(0, runner.report.free_pages - runner.report.owed_pages - runner.pending_pages)


def free_tokens(runner: Runner) -> int:
    """The longest sequence that fits: n tokens need ceil(n / P) pages, so they fit iff n <= free_pages * P."""
    return free_pages(runner) * runner.spec.page_tokens if runner.spec else 0


def working_set(runner: Runner) -> int:
    """Sequences it has or was assigned (Punica's working set)."""
    return len(runner.included) + len(runner.pending)


def preference(working_set: int, good_sequences: int) -> int:
    """How much a runner is preferred: below its best batch the fuller the better (Punica, section 5.1).

    At its best batch and beyond it is below every runner that is not there yet, the less the farther it has gone, but
    still before nobody: a request that only it can take is better off in a slower batch than in the queue.
    """
    return working_set if working_set < good_sequences else good_sequences - 1 - working_set


def is_busy(runner: Runner) -> bool:
    """At least half full, of sequences (those that it runs well) or of pages: not lightly loaded."""
    if runner.spec is None:
        return False
    full = 2 * working_set(runner) >= runner.spec.good_sequences
    return full or (working_set(runner) > 0 and 2 * free_pages(runner) <= runner.spec.total_pages)


def reserve(runner: Runner, request_id: str, pending: Pending) -> None:
    """Count an Assign until a report includes it."""
    assert request_id not in runner.pending
    runner.pending[request_id] = pending
    runner.pending_pages += pending.pages
    _count(runner.active, pending.digest, 1)


def release(runner: Runner, request_id: str) -> None:
    """An Assign that no report will include. What a report includes stays: the runner's book is the truth."""
    pending = runner.pending.pop(request_id, None)
    if pending is not None:
        runner.pending_pages -= pending.pages
        _count(runner.active, pending.digest, -1)


def include(runner: Runner, report: RunnerReport) -> list[str]:
    """Take a report over. Returns the requests whose Assign it acknowledges."""
    runner.report = report
    runner.included = {s.request_id: s.epoch for s in report.sequences}
    runner.errors = {a.digest: a.error for a in report.adapters if a.error}
    acknowledged = [r for r, p in runner.pending.items() if _covers(runner.included.get(r), p.epoch)]
    for request_id in acknowledged:
        runner.pending_pages -= runner.pending.pop(request_id).pages
    runner.active = {}
    for sequence in report.sequences:
        _count(runner.active, sequence.digest, 1)
    for pending in runner.pending.values():
        _count(runner.active, pending.digest, 1)
    return acknowledged


def reindex(pool: Pool, runner: Runner, placeable: bool) -> None:
    """Put a runner where its room and working set say, or nowhere."""
    if runner.shelved is not None:
        shape, key, digests = runner.shelved
        pool.shelves.by_shape[shape].drop(key, digests)
        pool.shelves.prune(shape)
        runner.shelved = None
    _count_share(pool, runner)
    if not placeable or runner.spec is None:
        return
    room = free_tokens(runner)
    if room > 0 and working_set(runner) < runner.spec.max_sequences:
        key = Key(preference(working_set(runner), runner.spec.good_sequences), runner.id.uuid)
        busy = busy_slots(pool, runner, runner.spec.max_adapters)
        digests = None if len(busy) < runner.spec.max_adapters else busy
        pool.shelves.shelf(runner.shape).put(key, room, runner.priority, digests)
        runner.shelved = (runner.shape, key, digests)


def busy_slots(pool: Pool, runner: Runner, max_adapters: int) -> tuple[str, ...]:
    """Digests whose slots no other adapter can get: in use, or pinned. A runner protects all its slots but one."""
    pinned = pool.desired.pinned[: max(0, max_adapters - 1)]
    return tuple(dict.fromkeys((*runner.active, *pinned)))


def share_of(pool: Pool, runner: Runner) -> Share | None:
    """What it adds to its pool's totals: nothing before its first report, nor while it drains."""
    spec, report = runner.spec, runner.report
    if spec is None or report is None or report.draining:
        return None
    pinned = min(len(pool.desired.pinned), max(0, spec.max_adapters - 1))
    reserved = spec.total_pages - free_pages(runner)
    serves = runner.confirmed and runner.serving
    return Share(
        sequences=spec.good_sequences,
        kv_tokens=spec.total_pages * spec.page_tokens,
        reserved_tokens=reserved * spec.page_tokens,
        slots=spec.max_adapters - pinned,
        busy_slots=len(busy_slots(pool, runner, spec.max_adapters)) - pinned,
        total_pages=spec.total_pages * serves,
        reserved_pages=reserved * serves,
    )


def forget(pool: Pool, runner: Runner) -> None:
    """It is gone: its share too, and it cannot be told to go any more."""
    pool.totals.replace(runner.share, None)
    runner.share = None
    _count_taker(pool, runner)
    if runner.id.uuid in pool.victims:
        pool.victims.remove(runner.id.uuid)


def _count_share(pool: Pool, runner: Runner) -> None:
    share = share_of(pool, runner)
    if share != runner.share:
        pool.totals.replace(runner.share, share)
        runner.share = share
    _count_taker(pool, runner)


def _count_taker(pool: Pool, runner: Runner) -> None:
    takes_more = runner.share is not None and not runner.cordoned
    if takes_more != runner.takes_more:
        runner.takes_more = takes_more
        pool.takers[runner.shape] += 1 if takes_more else -1
        if not pool.takers[runner.shape]:
            del pool.takers[runner.shape]


def _covers(included: Epoch | None, epoch: Epoch) -> bool:
    return included is not None and included >= epoch


def _count(active: dict[str, int], digest: str, by: int) -> None:
    """The base takes no slot."""
    if digest == BASE:
        return
    count = active.get(digest, 0) + by
    if count:
        active[digest] = count
    else:
        del active[digest]
