"""Recording in one tree what every tree is to answer: `python -m harness.differential.record --part tests --out FILE`.

It runs the simulator and tests of this tree, and writes down what they ask of the code, not what they expect: events of
the machines of scheduler and supervisor, what happens to the planner's worlds, calls of the codec, bodies, manifests.
Whatever a test changes past these ways is not in the recording; both trees replay the same recording all the same.
"""

import argparse
import importlib
import inspect
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy

from fuzz.__main__ import CORPUS
from fuzz.targets import TARGETS
from harness.bad_manifests import BAD, GOOD
from harness.conflicting_manifests import PASSING, REFUSED
from harness.differential.values import Json, own_tree, plain, write
from harness.directions import CODEC, DIRECTIONS
from harness.field_edits import right_edits, wrong_edits
from tests.unit.operator import cluster, planning
from weft.domain.machine import TICK
from weft.domain.prediction import Prediction
from weft_scheduler.core import Scheduler
from weft_sim.scenario import Run
from weft_sim.simulate import PoolDescription, simulate
from weft_sim.traces import TraceArrival
from weft_supervisor.core import Supervisor

PLANNED = (
    "reconcile", "reconcile_properties", "scaling", "rollout", "replicas", "canary", "scale_in", "runner_pods", "drift",
    "events", "cluster_properties", "field_edits", "version_skew", "children", "retention",
)  # fmt: skip
TESTS = ("scheduler", "supervisor", "wire/test_codec.py", *(f"operator/test_{name}.py" for name in PLANNED))
OPTIONS = ("-q", "-n0", "-p", "no:cacheprovider", "--ignore=tests/unit/scheduler/test_scale.py")  # it counts lines
MAX_EVENTS, MAX_STEPS = 4_000, 200  # of one machine and one world; what comes later is left out
MAX_OF_TEST = 40  # machines, worlds and different calls
INPUTS = ("now", "contents", "ready_runners", "scheduler_speaks", "demand", "canaries", "policy")
CLUSTER_INPUTS = ("cluster.pods_become_ready", "cluster.nodes", "cluster.refuses")
STEPS: Mapping[type, Sequence[str]] = {
    planning.World: ("apply", "plan", "step", "settle", "remove", "wait", "answers"),
    cluster.ClusterWorld: ("step", "answers"),
    planning.ObjectStore: ("apply", "delete"),
}
POOLS = (  # queue, phases, reservation, consolidation, adapters
    ("fcfs", "unified", "calibrated", "always", 6), ("fcfs", "split", "pooled", "never", 6),
    ("shortest", "unified", "paged", "never", 6), ("shortest", "split", "calibrated", "always", 0),
    ("s3", "unified", "s3", "never", 6), ("s3", "split", "constant", "always", 6),
    ("fcfs", "unified", "max", "never", 0),
)  # fmt: skip


class Recorder:
    """Records of what runs now, whose name is `name`. They may grow until it is over."""

    def __init__(self) -> None:
        self.name, self.depth = "", 0
        self.records: list[Json] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seen: set[str] = set()

    def record(self, kind: str, *, once: bool = False, **fields: Json) -> Json:
        """A new record; None where there are enough, or where the same `once` was recorded before."""
        text = json.dumps(fields) if once else ""
        if self._counts[self.name, kind] >= MAX_OF_TEST or text in self._seen:
            return None
        self._seen |= {text} - {""}
        self._counts[self.name, kind] += 1
        made = {"kind": kind, "name": f"{self.name} #{self._counts[self.name, kind]}", **fields}
        self.records.append(made)
        return made

    def taken(self) -> list[Json]:
        records, self.records = self.records, []
        return records

    @contextmanager
    def call(self) -> Generator[bool]:
        """Whether a call is made by the test itself."""
        self.depth += 1
        try:
            yield self.depth == 1
        finally:
            self.depth -= 1


# ---------------------------------------------------------------- machines


def record_machine(recorder: Recorder, of: Any) -> None:
    """Have a class's machines write events down from now on. An event is late where a deadline was missed before."""
    made, handle = of.__init__, of.handle

    @wraps(made)
    def init(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.recorded = recorder.record("machine", of=of.__name__, args=plain(args), more=plain(more), events=[])

    @wraps(handle)
    def handled(self: Any, event: Any, now: float) -> Any:
        if self.recorded is not None and len(self.recorded["events"]) < MAX_EVENTS:
            deadline = self.next_deadline()
            late = deadline is not None and deadline < now
            if event is not TICK or late:
                self.recorded["events"].append([now, late, plain(event)])
        return handle(self, event, now)

    of.__init__, of.handle = init, handled


def simulations(recorder: Recorder, seeds: int) -> Iterator[Json]:
    """Drawn deployments with faults, and pools of every queue policy that have more requests than room."""
    for seed in range(seeds):
        recorder.name = f"check {seed}"
        recorder.record("seed", seed=seed)
        run = Run(seed, check=False)
        run.run()
        for record in recorder.taken():
            record.get("events", []).append([run.world.clock.now, False, None])
            yield record
    for number, (queue, phases, reservation, consolidation, adapters) in enumerate(POOLS * (1 + seeds // 100)):
        recorder.name = f"pool {number} {queue} {phases} {reservation} {consolidation}"
        pool = PoolDescription(
            runners=3, max_sequences=6, total_pages=256, gateways=2, slots=3, cpu=False, page_kib=16.0, queue=queue,
            phases=phases, reservation=reservation, consolidation=consolidation, adapters=adapters,
        )  # fmt: skip
        tenants = ("default",) if adapters else ("red", "blue", "blue")  # adapters are for their own namespace
        simulate(pool, list(_arrivals(random.Random(number), 150, tenants)), number)
        yield from recorder.taken()


def _arrivals(chance: random.Random, count: int, tenants: Sequence[str]) -> Iterator[TraceArrival]:
    at_s = 0.0
    for _ in range(count):
        at_s += chance.expovariate(20.0)
        prompt, output = int(chance.lognormvariate(4.5, 1.0)) + 1, int(chance.lognormvariate(3.6, 0.9)) + 1
        p90 = max(4, int(output * chance.choice((0.5, 1.0, 1.5))))
        yield TraceArrival(
            at_s, min(prompt, 800), min(output, 200), stops=True, max_tokens=300, tenant=chance.choice(tenants),
            predicted=Prediction("", p90 // 2, p90, "drawn", p90 // 4, 2 * p90),
        )  # fmt: skip


# ---------------------------------------------------------------- worlds of the planner


def record_worlds(recorder: Recorder) -> None:
    """Have worlds of planner tests write down from now on what is done with them and changed before each step."""
    for of in (planning.World, cluster.ClusterWorld):
        _record_start(recorder, of)
    for of, methods in STEPS.items():
        for method in methods:
            _record_step(recorder, of, method)
    restarted: Any = planning.World.restarted

    def again(self: Any, **more: Any) -> Any:
        """The new world goes on with what the old one has done so far; the old one may go on, too."""
        with recorder.call():
            after = restarted(self, **more)
        if self.recorded is not None:
            _did(self, "restarted", (), more)
            start = {name: self.recorded[name] for name in ("cluster", "objects", "version", "now")}
            _open(after, recorder.record("world", steps=[*self.recorded["steps"]], **start))
            self.recorded["steps"].pop()
        return after

    planning.World.restarted = again


def _record_start(recorder: Recorder, of: Any) -> None:
    made = of.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        with recorder.call() as outermost:
            start = {"cluster": of is cluster.ClusterWorld, "objects": plain(self.store.objects())}
            start |= {"version": self.store.version, "now": self.now}
            _open(self, recorder.record("world", steps=[], **start) if outermost else None)

    of.__init__ = init


def _open(world: Any, record: Json) -> None:
    world.recorded, world.recorded_inputs, world.store.recorded_world, world.recorded_world = record, {}, world, world


def _record_step(recorder: Recorder, of: type, method: str) -> None:
    do, name = getattr(of, method), f"store.{method}" if of is planning.ObjectStore else method

    @wraps(do)
    def step(self: Any, *args: Any, **more: Any) -> Any:
        with recorder.call() as outermost:
            if outermost and (world := getattr(self, "recorded_world", None)) is not None and world.recorded:
                _did(world, name, args, more)
            return do(self, *args, **more)

    setattr(of, method, step)


def _did(world: Any, name: str, args: Sequence[Any], more: Mapping[str, Any]) -> None:
    steps, inputs = world.recorded["steps"], world.recorded_inputs
    if len(steps) > MAX_STEPS:
        return
    for key in (*INPUTS, *(CLUSTER_INPUTS if world.recorded["cluster"] else ())):
        holder, _, field = key.rpartition(".")
        value = getattr(getattr(world, holder) if holder else world, field)
        if key not in inputs or inputs[key] != value:
            inputs[key] = dict(value) if isinstance(value, dict) else value
            steps.append(["set", [key, plain(value)], {}])
    steps.append([name, plain(args), plain(more)])


# ---------------------------------------------------------------- the codec


def record_codec(recorder: Recorder) -> None:
    """Write down from now on what directions decode, and which functions that read or make a message do so."""
    names = {id(direction): name for name, direction in DIRECTIONS.items()}
    for of in {type(direction) for direction in DIRECTIONS.values()}:
        of.decode = _recorded(recorder, _method(of.decode), lambda args: (names.get(id(args[0]), ""), args[1:]))
    for short, module in CODEC.items():
        for name, function in list(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__ and _is_of_messages(function):
                called = f"{short}.{name}"
                setattr(module, name, _recorded(recorder, function, lambda args, called=called: (called, args)))


def _method(function: Any) -> Any:
    """Make a method of what a class may have as another object's own."""
    return function if inspect.isfunction(function) else lambda _, *args: function(*args)


def _recorded(recorder: Recorder, function: Any, named: Callable[[Any], tuple[str, Any]]) -> Any:
    @wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        with recorder.call() as outermost:
            name, arguments = named(args)
            if outermost and name and not more:
                recorder.record("call", once=True, call=name, args=plain(arguments))
            return function(*args, **more)

    return call


def _is_of_messages(function: Callable[..., Any]) -> bool:
    """Whether it reads a message or makes one. What fills a message in place is part of a direction."""
    hints = inspect.get_annotations(function, eval_str=True)
    is_read = any(isinstance(hint, type) and issubclass(hint, Message) for hint in hints.values())
    return is_read and hints["return"] is not None and not function.__name__.startswith("_")


def record_messages(recorder: Recorder, each: int) -> None:
    """Decode drawn messages of every class of every direction, as the codec's tests draw them."""
    test_codec = importlib.import_module("tests.unit.wire.test_codec")  # with the functions that are recorded
    for name, direction in DIRECTIONS.items():
        for of in direction.messages:
            recorder.name = f"{name} {of.__name__}"
            _decode_drawn(direction, test_codec.values_of(of), each)


def _decode_drawn(direction: Any, messages: SearchStrategy[Any], count: int) -> None:
    @settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(messages)
    def decode(message: Any) -> None:
        direction.decode(direction.encode(message))

    decode()


# ---------------------------------------------------------------- bodies and manifests


def record_bodies(recorder: Recorder, each: int) -> None:
    """Examples, findings and edits of the fuzz targets. Of messages what they decode: bytes mean another edit later."""
    for name, target in TARGETS.items():
        chance, found = random.Random(name), [path.read_bytes() for path in sorted(CORPUS.glob(f"{name}/*"))]
        edits = (chance.randbytes(chance.randrange(200)) for _ in range(each))
        for number, data in enumerate((*target.examples, *found, *edits)):
            recorder.name = f"fuzz {name} {number}"
            if name in ("peer-messages", "kv-frames", "scheduler", "supervisor"):
                target.run(data)
            elif name not in ("runner", "gateway"):
                recorder.record("body", target=name, data=plain(data))


def record_manifests(recorder: Recorder) -> None:
    """Each bad one, each one at a bound, the worlds of rules between objects, and each edit of each field."""
    wishes = [(row.name, row.wish, row.before) for row in BAD] + [(name, wish, None) for name, wish in GOOD.items()]
    for kind, base in ("ServingPool", planning.pool_object()), ("LoRAAdapter", planning.adapter_object("upper")):
        for path, value in (*right_edits(kind, most=3), *wrong_edits(kind)):
            wish = json.loads(json.dumps(base))
            inner = wish["spec"]
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            inner.pop(path[-1], None) if value is None else inner.update({path[-1]: value})
            wishes.append((f"{'.'.join(path)} {value}", wish, None))
    for recorder.name, wish, before in wishes:
        recorder.record("manifest", wish=wish, before=before)
    for row in (*REFUSED, *PASSING):
        recorder.name = row.name
        recorder.record("conflict", wish=row.wish, there=row.there)


# ---------------------------------------------------------------- the command


class Plugin:
    """Tell pytest what runs now."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._recorder.name = item.nodeid.partition("unit/")[2]


def tests(recorder: Recorder, *, more: bool) -> Iterator[Json]:
    """What tests ask, and what their tables have."""
    record_codec(recorder)
    record_worlds(recorder)
    record_messages(recorder, 200 if more else 15)
    record_bodies(recorder, 400 if more else 60)
    record_manifests(recorder)
    recorder.name = "files"
    recorder.record("files")
    os.environ["WEFT_TEST_EXAMPLES"] = "100" if more else "12"
    code = pytest.main([*OPTIONS, *(f"tests/unit/{name}" for name in TESTS)], plugins=[Plugin(recorder)])
    assert code <= pytest.ExitCode.TESTS_FAILED, f"pytest ended with {code}"
    yield from recorder.taken()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.differential.record", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file to write, compressed")
    parser.add_argument("--part", choices=("simulations", "tests"), required=True)
    parser.add_argument("--all", action="store_true", help="more seeds and examples")
    options = parser.parse_args(arguments)
    own_tree()
    recorder, more = Recorder(), options.all
    for machine in (Scheduler, Supervisor):
        record_machine(recorder, machine)
    is_simulated = options.part == "simulations"
    write(options.out, simulations(recorder, 200 if more else 24) if is_simulated else tests(recorder, more=more))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
