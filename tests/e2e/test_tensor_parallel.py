"""A runner that is split over two processes, beside a whole one in a pool: the same texts, also when a rank is killed.

The pool's objects do not ask for either way to split one, so its second runner is started by the test, with the flags
of the first and `--tensor-parallel 2` or `--pipeline-parallel 2`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from crowd import SLOW, Crowd, Watched, assert_undisturbed, crowd, emitted, finished, runners
from oracle import sure_cases
from quickstart import Case, copy_manifests
from waiting import eventually
from weft_bench.scrape import scrape, total
from weft_bench.stack import Stack, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")
ATTEMPTS = 5  # rounds in which the moment to strike may come


@dataclass
class Split:
    """A stack with a runner of its own, and a second one of two ranks."""

    stack: Stack
    runner: psutil.Popen
    address: str
    probes: str

    @property
    def rank(self) -> psutil.Process:
        """Rank 1."""
        (child,) = self.runner.children()
        return child

    async def wait_until_ready(self) -> None:
        async def both() -> bool:
            listed = await runners(self.stack.address("supervisor"))
            return sum(r.ready and not r.draining for r in listed.runners) == 2

        await eventually(both, timeout_s=60)

    async def streams(self, made: Crowd) -> list[tuple[Watched, int]]:
        """Those that run on the split runner, and how many tokens each has."""
        listed = await runners(self.stack.address("supervisor"))
        return [one for r in listed.runners if r.runner.address == self.address for one in emitted(r, made)]


@pytest.fixture(scope="module", params=["--tensor-parallel", "--pipeline-parallel"])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    """Runners of at most 12 sequences: 20 streams need both."""
    manifests = copy_manifests(tmp_path_factory.mktemp("m"), scheduler={"maxSequences": 12})
    with Stack(manifests, tmp_path_factory.mktemp("w"), environment=SLOW) as stack:
        stack.wait_for_models()
        made = Split(stack, *second_runner(stack, tmp_path_factory.mktemp("r"), request.param))
        try:
            yield made
        finally:
            if made.runner.poll() is None:
                made.runner.kill()
                made.runner.wait()


def second_runner(stack: Stack, data: Path, how: str) -> tuple[psutil.Popen, str, str]:
    """Its process, where it serves and where it tells its metrics."""
    words = psutil.Process(stack.pid(stack.names("runner")[0])).cmdline()[3:]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    address, probes = (f"127.0.0.1:{free_port()}" for _ in range(2))
    flags |= {"--listen": address, "--probes": probes, "--data-dir": str(data), "--name": "split"}
    flags |= {"--executor": "reference", how: "2"}
    words = [word for pair in flags.items() for word in pair]
    with (data / "runner.log").open("wb") as log:
        command = [sys.executable, "-m", "weft_runner", *words]
        return psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT), address, probes


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """20 long answers, none of them near a tie."""
    return sure_cases(MODELS, 20, seed=20)


async def test_a_split_runner_gives_the_same_texts_and_its_requests_go_on_elsewhere_when_a_rank_dies(
    split: Split, cases: list[Case]
) -> None:
    await split.wait_until_ready()
    assert_undisturbed(await finished(split.stack.url, cases, "quiet"))
    assert total(scrape(split.probes), "weft_runner_tokens_total") >= 4 * 100, (
        "8 streams are too many for the other one"
    )
    for attempt in range(ATTEMPTS):
        moves = split.stack.metric("scheduler", "weft_scheduler_moves_total")
        async with crowd(split.stack.url, cases, f"split-{attempt}") as made:
            victims = await strike(split, made)
        assert_undisturbed(list(made.streams))
        if victims:
            assert split.stack.metric("scheduler", "weft_scheduler_moves_total") - moves >= len(victims)
            assert split.runner.wait(20) == 1
            return
    pytest.fail(f"no moment to strike in {ATTEMPTS} rounds")


async def strike(split: Split, made: Crowd) -> list[Watched]:
    """Kill rank 1 once its runner has 6 streams or more, each with at least 5 and less than 60 % of its tokens."""
    while made.running:
        victims = await split.streams(made)
        if len(victims) >= 6 and all(5 <= n < 0.6 * len(w.case.expect) for w, n in victims):
            os.kill(split.rank.pid, signal.SIGKILL)
            return [watched for watched, _ in victims]
    return []
