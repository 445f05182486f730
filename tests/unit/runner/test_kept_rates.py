"""Measurements of a machine that outlive the process that took them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft_runner.model import kept_rates, rates_identity
from weft_runner.offload import Formats, MachineRates

RATES = MachineRates(1e9, 5e8, 1e10, 1e10, 2e10, 1e10, 1e10, 1e11, {"bf16": ((1, 1e-10), (16, 3e-10))})
IDENTITY = rates_identity("avx2 5", "sha256:" + "5" * 64, Formats(), 2)


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_text(path.read_text()[:-40]), "damaged"),
        (lambda path: path.write_bytes(b"\xff" * 100), "damaged"),
        (lambda path: path.write_text("[]"), "damaged"),
        (lambda path: path.write_text("x" * (2 << 20)), "bytes"),
        (lambda path: changed(path, rates={"disk_read": 1e12}), "its digest is not that of its rates"),
        (lambda path: changed(path, identity={**IDENTITY, "processor": "64 x another"}), "its identity is another"),
    ],
)
def test_a_file_that_is_damaged_or_of_others_is_named_and_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], why: str
) -> None:
    caplog.set_level("INFO")
    taken: list[MachineRates] = []

    def measure() -> MachineRates:
        taken.append(RATES)
        return RATES

    assert kept_rates(tmp_path, IDENTITY, measure) == RATES
    assert kept_rates(tmp_path, IDENTITY, measure) == RATES
    assert len(taken) == 1
    (path,) = tmp_path.iterdir()
    spoil(path)
    caplog.clear()
    assert kept_rates(tmp_path, IDENTITY, measure) == RATES
    assert len(taken) == 2
    (record,) = caplog.records
    fields = vars(record)["kv"]
    assert fields["path"] == str(path)
    assert why in fields["why"]
    assert kept_rates(tmp_path, IDENTITY, measure) == RATES
    assert len(taken) == 2


def test_another_model_or_format_is_measured_of_its_own_and_what_cannot_be_kept_is_still_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for formats in (Formats(), Formats("int4")):
        kept_rates(tmp_path, rates_identity("avx2 5", "sha256:5", formats, 2), lambda: RATES)
    assert len(list(tmp_path.iterdir())) == 2
    assert kept_rates(tmp_path / "nowhere", IDENTITY, lambda: RATES) == RATES
    assert "what was measured is not kept" in caplog.messages
