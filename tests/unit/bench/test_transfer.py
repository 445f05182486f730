"""The benchmark of KV between two processes runs, by every carrier that needs no certificates."""

import pytest

from weft_bench import transfer
from weft_bench.transfer_ends import Carrier


@pytest.mark.parametrize("shared_memory", [False, True])
def test_transfers_are_acknowledged_and_timed(shared_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SHAPE", "tiny")
    monkeypatch.setattr(transfer, "page_bytes", lambda: 30 << 10)
    rate, cpu_s = transfer._carried(Carrier("test", shared_memory), 3)  # pyright: ignore[reportPrivateUsage]
    assert rate > 0
    assert cpu_s > 0
