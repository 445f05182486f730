"""Files that take long begin first, so that no worker ends long after the others.

It changes no result, only the length of a run: a file that is missing here begins later.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Of each suite, the longest one first: each of them takes ten seconds or more.
LONG = (
    "unit/runner/test_offload_executor.py",
    "unit/runner/test_offload_policy.py",
    "unit/cli/test_plan_offload.py",
    "unit/bench/test_fidelity_silicon.py",
    "unit/runner/test_cuda_engine.py",
    "sim/test_migration.py",
    "sim/test_phase_groups.py",
    "sim/test_check.py",
    "kernels/triton/test_gpu_bench.py",
    "kernels/triton/test_gpu_check.py",
    "oracle/test_cuda.py",
    "oracle/test_native_grid.py",
    "oracle/test_rank_grid.py",
    "integration/runner/test_lost_ranks.py",
    "integration/runner/test_ranks_of_hosts.py",
    "integration/batch/test_process.py",
    "integration/runner/test_runner_process.py",
    "integration/bench/test_peers.py",
    "integration/wire/test_dead_links.py",
    "integration/operator/test_stack.py",
    "integration/bench/test_cpu_commands.py",
    "integration/supervisor/test_two_supervisors.py",
    "integration/predictor/test_predictor_process.py",
    "e2e/test_faults.py",
    "e2e/test_spread_runners.py",
    "e2e/test_split_models.py",
    "e2e/test_phases.py",
    "e2e/test_batches.py",
    "e2e/test_offload.py",
    "e2e/test_lifecycle.py",
    "e2e/test_lying_runners.py",
    "e2e/test_autoscaling.py",
    "e2e/test_bad_input.py",
    "e2e/test_choices_and_likelihoods.py",
    "e2e/test_many_adapters.py",
)
PLACES = {TESTS / name: place for place, name in enumerate(LONG)}


def long_first(items: list[pytest.Item]) -> None:
    """Sort the tests by their files; those of one file stay in their order."""
    items.sort(key=lambda item: PLACES.get(item.path, len(LONG)))
