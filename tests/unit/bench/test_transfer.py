"""The benchmark of KV between two processes runs, by every carrier that needs no certificates."""

import pytest

from weft_bench.figures import transfer


@pytest.mark.parametrize("shared_memory", [False, True])
def test_transfers_are_acknowledged_and_timed(shared_memory: bool) -> None:
    place, carrier = (
        transfer.Geometry(pages=128, layers=4, page_bytes=30 << 10),
        transfer.Carrier("test", shared_memory),
    )
    rate, cpu_s = transfer.carried(place, carrier, 3)
    assert rate > 0
    assert cpu_s > 0
