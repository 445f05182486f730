"""How a request goes through the scheduler: in the page's order, not deep, and never from a policy upwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import weft
import weft_scheduler.core
from harness.scheduler_driver import POOL, Driver, of
from harness.walk import Call, callers, names_out_of_order, traced
from weft.domain.machine import Kind, Peer, Received
from weft.domain.request import Assign, FailReason, Priority, Submit
from weft_scheduler.core.effects import Effect, Event

CORE = Path(str(weft_scheduler.core.__file__)).parent
ROOTS = str(CORE), str(Path(str(weft.__file__)).parent)
MAX_FRAMES = 10  # from an event on; what is below in the treap of capacities is a search of its own
MAX_MODEL_EDGES = 4  # different calls from `core/model/` into `core/policy/`
TREAP = CORE / "policy" / "placement" / "capacity_treap.py"
KV = {"kv_layout": "l", "kv_address": "tcp:1", "prefill_tokens_per_s": 1000.0}


def calls_of(run: Callable[[], object]) -> list[Call]:
    """Return every call, in order."""
    calls: list[Call] = []

    def on_call(frame: FrameType, caller: FrameType) -> None:
        frames = sum(above.f_code.co_filename.startswith(str(CORE)) for above in callers(frame))
        calls.append(Call(frame.f_code, caller.f_code, frames))

    with traced(ROOTS, on_call):
        run()
    return calls


@pytest.fixture
def submit_walk() -> list[Call]:
    """Calls of a Submit that a runner has room for, among two runners and with an adapter that neither has."""
    driver = Driver().start("d1", "d2")
    for uuid in ("r1", "r2"):
        driver.runner(uuid, ready=True)
    driver.place("before", "d1")
    driver.wait(1.0)
    submit = Submit("r", POOL, "acme", "m", "d2", 16, 100, p90_tokens=16)
    effects: list[Any] = []
    event = Received(Peer(Kind.GATEWAY, "g"), submit)
    calls = calls_of(lambda: effects.extend(driver.core.handle(event, driver.now)))
    assert [assign.request_id for assign in of(effects, Assign)] == ["r"]
    return calls


def test_the_page_tells_the_walk_of_a_request_in_order(submit_walk: list[Call]) -> None:
    missing = names_out_of_order("A request through the scheduler", submit_walk)
    assert not missing, f"not called, or not in that place: {missing}"


def test_a_submit_is_not_deep(submit_walk: list[Call]) -> None:
    frames = {call.name: call.frames for call in submit_walk if call.path != TREAP}
    assert {name: n for name, n in frames.items() if n > MAX_FRAMES} == {}
    model, policy = CORE / "model", CORE / "policy"
    of_model = [call for call in submit_walk if model in Path(call.caller.co_filename).parents]
    assert of_model
    below = {call.name for call in of_model if policy in call.path.parents}
    assert len(below) <= MAX_MODEL_EDGES, below


class Unchecked(Driver):
    """The laws are checked elsewhere."""

    def handle(self, event: Event) -> list[Effect]:
        return self.core.handle(event, self.now)


def events(queue: str, phases: str, reservation: str) -> Iterator[Callable[[], object]]:
    """A busy pool: tenants that share, adapters, lines of a batch, failures, runners that go, time that passes."""
    driver = Unchecked(starvation_bound=2).start(
        "d1", "d2", queue=queue, phases=phases, reservation=reservation, min_runners=1, max_runners=4,
        consolidation="always", max_queue=9, slo_ttft_s=0.5, slo_reject=True,
    )  # fmt: skip
    for uuid in ("a", "b", "c"):
        yield lambda uuid=uuid: driver.runner(uuid, max_sequences=2, step_ms_best=20.0, best_batch=2, **KV)
    for number in range(24):
        line: dict[str, Any] = {"priority": Priority.BATCH} if number % 5 == 0 else {"namespace": f"ns{number % 3}"}
        size = {"prompt_tokens": 16 * (1 + number % 7), "p10_tokens": 4, "p50_tokens": 16, "p90_tokens": 64}
        yield lambda number=number, size=size, line=line: driver.submit(
            f"r{number}", f"d{number % 2 + 1}", **size, **line
        )
        yield lambda: driver.wait(0.05)
    yield lambda: [driver.runner(uuid, *seen(driver, uuid), free=60) for uuid in ("a", "b", "c")]
    for number in range(0, 24, 4):
        yield lambda number=number: driver.knows(f"r{number}") and driver.outcome(f"r{number}")
    placed = [request for request in driver.state.requests.values() if request.placed][:2]
    for request in placed:
        yield lambda request=request: driver.failed(request.id, FailReason.RUNNER_ERROR, 2)
    yield lambda: driver.runner("b", *seen(driver, "b"), free=60, draining=True)
    yield lambda: driver.wait(30.0)
    yield lambda: driver.lost("b")
    yield lambda: driver.wait(120.0)


def seen(driver: Driver, uuid: str) -> list[Any]:
    """What a runner reports of the requests that are placed there."""
    return [driver.view(request_id) for request_id in sorted(driver.record(uuid).accounts.owned)]


@pytest.mark.parametrize("queue", ["fcfs", "s3", "shortest"])
@pytest.mark.parametrize(("phases", "reservation"), [("unified", "calibrated"), ("split", "pooled")])
def test_no_policy_calls_up_into_the_core(queue: str, phases: str, reservation: str) -> None:
    core, policy, up, called = str(CORE), str(CORE / "policy"), set[str](), 0

    def on_call(frame: FrameType, caller: FrameType) -> None:
        nonlocal called
        if caller.f_code.co_filename.startswith(policy):
            called += 1
            path = frame.f_code.co_filename
            if path.startswith(core) and not path.startswith(policy):
                up.add(f"{caller.f_code.co_qualname} -> {frame.f_code.co_qualname}")

    for event in events(queue, phases, reservation):
        with traced(ROOTS, on_call):
            event()
    assert called > 1_000
    assert up == set()
