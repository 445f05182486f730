"""How many runners now. Pure; later the scheduler's wish and the pool's bounds are weighed here too."""

from weft_operator.observe import Launch, RunnerProcess
from weft_operator.resources import Pool

RUNNERS_MAX = 1024


def wanted_runners(pool: Pool, default: int) -> int:
    """Runners that this pool should have. `default` is the backend's, for a pool that names no number."""
    return min(pool.replicas if pool.replicas is not None else default, RUNNERS_MAX)


def launch(pool: Pool, base_digest: str) -> Launch:
    """What each runner of this pool is started with."""
    return Launch(
        pool=pool.meta.ref,
        base_digest=base_digest,
        page_tokens=pool.page_tokens,
        kv_pages=pool.kv_pages,
        max_sequences=pool.max_sequences,
        max_adapters=pool.max_adapters,
        max_rank=pool.max_rank,
        max_batch_tokens=pool.max_batch_tokens,
    )


def to_start(wanted: Launch, count: int, present: dict[int, RunnerProcess]) -> list[int]:
    """Indexes to start, or to start anew with another launch.

    Missing runners start all at once. Outdated ones are replaced one at a time, each when every other runner that is
    wanted is ready, so that a change of a pool never takes all of its runners away; a runner that cannot start anyway
    is replaced at once.
    """
    missing = [index for index in range(count) if index not in present]
    kept = {index: runner for index, runner in present.items() if index < count}
    outdated = sorted(index for index, runner in kept.items() if runner.launch != wanted)
    broken = [index for index in outdated if kept[index].state == "CrashLoop"]
    settled = not missing and all(runner.state == "Ready" for i, runner in kept.items() if i not in outdated[:1])
    return missing + (broken or (outdated[:1] if settled else []))


def to_stop(count: int, present: dict[int, RunnerProcess]) -> list[int]:
    """Indexes beyond the wanted number, the highest first."""
    return sorted((index for index in present if index >= count), reverse=True)
