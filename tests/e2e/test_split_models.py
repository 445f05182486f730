"""A pool whose runners split the model over two processes each: the right texts, also when a rank is killed."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from harness.crowd import Crowd, Watched, assert_undisturbed, emitted, load
from harness.quickstart import Case, copy_manifests, sure_cases
from harness.waiting import PATIENCE_S, eventually
from weft_bench.reports import runners
from weft_bench.stack import Stack

MODELS = ("weft-quickstart", "acme/upper", "acme/reverse-words", "initech/cipher")


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two runners of two ranks and at most 12 sequences each."""
    manifests = copy_manifests(
        tmp_path_factory.mktemp("m"), replicas=2, parallelism={request.param: 2}, scheduler={"maxSequences": 12}
    )
    with Stack(manifests, tmp_path_factory.mktemp("w")) as made:
        made.wait_for_models()
        yield made


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """20 long answers, none of them near a tie."""
    return sure_cases(MODELS, 20, seed=20)


async def test_a_split_runner_gives_the_right_texts_and_its_requests_go_on_elsewhere_when_a_rank_dies(
    stack: Stack, cases: list[Case]
) -> None:
    """Clients ask again and again: how many runners they fill must not hang on how fast this test reads."""
    await eventually(lambda: ready(stack, 2))
    ranks = {name: rank_of(stack, name) for name in stack.names("runner")}
    async with asyncio.timeout(3 * PATIENCE_S), load(stack.url, cases, "split", width=20) as made:
        await made.until(lambda: sum(w.finish is not None for w in made.streams) >= len(cases))
        moves = stack.metric("scheduler", "weft_scheduler_migrations_total")
        victims = await strike(stack, made, ranks)
        await eventually(lambda: moved(stack, moves + len(victims)))
    assert_undisturbed(made.streams)
    await eventually(lambda: ready(stack, 2))


async def strike(stack: Stack, made: Crowd, ranks: dict[str, psutil.Process]) -> list[Watched]:
    """Kill rank 1 of a runner that has 3 streams with at least 5 and less than two fifths of their tokens."""
    while True:
        for runner in await runners(stack.address("supervisor")):
            victims = [w for w, tokens in emitted(runner, made) if 5 <= tokens < 0.4 * len(w.case.expect)]
            if len(victims) >= 3:
                ranks[runner.spec.name].kill()
                return victims


def rank_of(stack: Stack, name: str) -> psutil.Process:
    """Rank 1 of a runner."""
    (child,) = psutil.Process(stack.pid(name)).children()
    return child


async def moved(stack: Stack, count: float) -> bool:
    return stack.metric("scheduler", "weft_scheduler_migrations_total") >= count


async def ready(stack: Stack, count: int) -> bool:
    listed = await runners(stack.address("supervisor"))
    return sum(one.figures.ready and not one.figures.draining for one in listed) == count
