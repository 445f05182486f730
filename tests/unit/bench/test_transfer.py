"""The benchmark of KV between two processes runs, by every carrier that needs no certificates."""

import pytest

from weft_bench.figures import transfer


@pytest.mark.parametrize("shared_memory", [False, True])
def test_transfers_are_acknowledged_and_timed(shared_memory: bool) -> None:
    assert transfer.transfer_s(32, transfer.Carrier("test", shared_memory), 3) > 0
