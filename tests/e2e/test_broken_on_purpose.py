"""Short forms of `weft bench faults`, `soak`, `histories` and `clients`: what `docs/reliability.md` promises."""

import os
import shutil
from pathlib import Path

import pytest

from harness.postgres import needs_postgres
from weft_stage.lines import Origin
from weft_trouble.crowds import ATTACKS, BLANKS, BODIES, BURSTS, FLOOD, IDLE, PROMPTS, SLOW_BODIES, SLOW_HEADS, SMALL
from weft_trouble.fault_streams import Difference
from weft_trouble.faults import Run, chosen
from weft_trouble.soak import STACK
from weft_trouble.through_clients import measure as beside_crowds
from weft_trouble.through_faults import measure
from weft_trouble.through_histories import measure as histories
from weft_trouble.through_soak import measure as soak

pytestmark = pytest.mark.slow
MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="disks are mounted and control groups made, as root")
PRELOADS = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc: apt-get install gcc libc6-dev")


@pytest.mark.parametrize(
    "cells",
    [
        ["deaf runner to supervisor *", "abandon gateway to scheduler *"],
        pytest.param(["* PostgreSQL *"], marks=[MOUNTS, needs_postgres, pytest.mark.long]),
        pytest.param(["* SQLite *"], marks=[MOUNTS, pytest.mark.long]),
        pytest.param(["mute *", "narrow *"], marks=pytest.mark.long),
        pytest.param(["disk-broken depot *", "disk-full controller *"], marks=[PRELOADS, pytest.mark.long]),
        pytest.param(["clock-*", "out-of-memory *"], marks=[MOUNTS, PRELOADS, pytest.mark.long]),
    ],
    ids=lambda cells: cells[0],
)
async def test_no_token_is_lost_repeated_or_wrong(cells: list[str], tmp_path: Path) -> None:
    runs = list[Run]()
    await measure([(cell, 1) for cell in chosen(cells)], tmp_path, 0, runs.append, print)
    assert runs
    assert {str(run.cell): (run.difference, run.failed) for run in runs} == {
        str(run.cell): (Difference(), 0) for run in runs
    }


async def test_everything_at_once_is_right(tmp_path: Path) -> None:
    said = list[str]()
    found = await soak(
        tmp_path, Origin("", "", ""), 0, minutes=0.3, warm_minutes=0.1, advance=lambda _s: None, say=said.append
    )
    of_stack = {line.metric: line.value for line in found if line.case == STACK}
    assert of_stack["wrong"] == 0, said
    assert of_stack["runners whose pages do not balance"] == 0
    assert {name for name in of_stack if name.startswith("right: ")} >= {
        f"right: {activity}"
        for activity in ("streams", "adapters that come, change and go", "keys made, used and revoked")
    }


@pytest.mark.long
async def test_what_many_clients_see_may_be(tmp_path: Path) -> None:
    said = list[str]()
    found, history = await histories(tmp_path, Origin("", "", ""), 0, minutes=0.25, say=said.append)
    assert {line.metric: line.value for line in found}["wrong"] == 0, said
    assert history.deleted
    assert history.revoked
    assert len({read.digest for read in history.reads if read.digest}) > 1


@pytest.mark.long
async def test_others_have_their_answers_beside_crowds() -> None:
    crowds = (IDLE, SLOW_HEADS, SLOW_BODIES, FLOOD, *BURSTS, *ATTACKS)
    found = await beside_crowds(crowds, 1, 0, Origin("", "", ""), print, scale=0.05)
    values = {(line.case, line.metric): line.value or 0.0 for line in found}
    assert sum(metric == "others' whole answer p99" for _, metric in values) == len(crowds)
    assert values["5 flood", "of the crowd: status 200"] > 0
    assert values["5 flood", "of the crowd: status 429"] > 0
    answers = {SMALL: "400", BODIES: "400", PROMPTS: "200"}
    assert all(values[f"5 {crowd}", f"of the crowd: status {status}"] > 0 for crowd, status in answers.items())
    assert values[f"1 {BLANKS}", "others' batch of one line"] > 0
    assert set(values) >= {("500 idle", "gateway, most resident"), ("25 slow heads", "gateway, most resident")}
