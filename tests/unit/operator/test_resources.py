"""What a stored object means: what it leaves open stands for nothing, or for the documented default."""

from typing import Any

import pytest

from tests.unit.operator.planning import pool_object, stored
from weft_operator.core import Pool, parse_pool

OFFLOAD = {"deviceBytes": "1Gi", "diskPath": "/weights", "weights": "bf16", "kv": "bf16"}


def parsed(**spec: Any) -> Pool:
    obj = pool_object(**spec)
    for name in ("maxSequences", "maxBatchTokens", "kvPages"):
        obj["spec"]["advanced"].pop(name)
    return parse_pool(stored(obj))


def test_a_pool_that_states_no_objective_has_none() -> None:
    pool = parsed()
    assert (pool.slo, pool.token_time_ms) == (None, 0)
    with_tokens_alone = parsed(slo={"tokenTimeMs": 50, "admission": "Queue"}).slo
    assert with_tokens_alone is not None
    assert (with_tokens_alone.ttft_ms, with_tokens_alone.token_time_ms) == (0, 50)


def test_runners_find_the_sizes_that_a_pool_leaves_open() -> None:
    pool = parsed(memory={"offload": OFFLOAD})
    assert (pool.kv_pages, pool.max_sequences, pool.max_batch_tokens) == (0, 0, 0)
    assert pool.offload is not None
    assert (pool.offload.host_bytes, pool.offload.disk_bytes) == (0, None)


@pytest.mark.parametrize("spec", [{}, {"rollout": {}}])
def test_a_rollout_that_is_left_open_replaces_one_runner_at_a_time(spec: dict[str, Any]) -> None:
    pool = parsed(**spec)
    assert (pool.max_unavailable, pool.max_surge, pool.max_evicted) == (1, 0, 1)


def test_a_pool_without_groups_has_one_that_may_be_empty_and_as_large_as_the_pool() -> None:
    template = {"image": "runner:1"}
    (group,) = parsed(template=template).groups
    assert (group.name, group.template, group.min, group.max, group.phase) == ("runners", template, 0, None, "Any")
