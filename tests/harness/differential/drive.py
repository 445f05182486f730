"""A replay of recordings by the code of one tree: `python -m harness.differential.drive --out FILE RECORDING...`.

This file is the adapter between recordings and code: a change of an interface that a table of names (`renames.toml`)
cannot tell is told here, in the tree that has the change. A line of a replay is [name of the record, kind of the
answer, when, the answer]; answers of one kind in one record keep their order.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import yaml
from google.protobuf.message import DecodeError

from fuzz.targets import TARGETS
from harness import chart
from harness.differential.values import Json, built, manifest, own_tree, plain, read, write
from tests.unit.operator.cluster import cluster_world
from tests.unit.operator.planning import ObjectStore, world_of
from tests.unit.operator.test_validation import Admission, Invalid, admit, ref_of
from tests.unit.operator.test_validation import world as store_of
from weft.api.conversion import convert
from weft.domain.machine import TICK, Send
from weft.wire.errors import PeerError
from weft_operator.core import Action
from weft_scheduler.core import Scheduler
from weft_sim.check import check_seed
from weft_supervisor.core import Supervisor

ROOT = Path(__file__).parents[3]
MACHINES: Mapping[str, Any] = {of.__name__: of for of in (Scheduler, Supervisor)}
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MAX_TICKS = 10_000  # between two events
MAX_CHARS = 500  # of an error's text
Answer = tuple[str, Any, Any]  # kind, when, value


def own(wish: Json) -> Any:
    """A manifest of the recording as this tree's API has it."""
    found = manifest(wish)
    return dict(convert(found).obj) if isinstance(found, dict) else found


# ---------------------------------------------------------------- each kind of record


def machine(record: Json) -> Iterator[Answer]:
    """The machine's effects, event by event, with a tick at every deadline that no event came too late for."""
    core, now = MACHINES[record["of"]](*built(record["args"]), **built(record["more"])), -inf
    for at, late, event in record["events"]:
        for _ in range(0 if late else MAX_TICKS):
            deadline = core.next_deadline()
            if deadline is None or deadline >= at:
                break
            now = max(now, deadline)
            yield from _effects(core.handle(TICK, now), now)
        now = max(now, at)
        if event is not None:
            yield from _effects(core.handle(built(event), at), at)


def _effects(effects: Sequence[Any], now: float) -> Iterator[Answer]:
    for effect in effects:
        yield type(effect.message if isinstance(effect, Send) else effect).__name__, now, effect


def world(record: Json) -> Iterator[Answer]:
    """Every action of every plan."""
    store = ObjectStore(lambda: 0.0, [own(obj) for obj in record["objects"]], record["version"])
    of = (cluster_world if record["cluster"] else world_of)(store, {}, record["now"])
    said: list[Answer] = []
    for number, (name, arguments, more) in enumerate(record["steps"]):
        _listen(of, number, said)
        try:
            of = _step(of, name, built(arguments), built(more)) or of
        except Exception as error:  # noqa: BLE001 (an answer, too)
            said.append(("raises", number, _text(error)))
        yield from said
        said.clear()
    yield from (("object", ref_of(obj), obj) for obj in of.store.objects())


def _listen(of: Any, number: int, said: list[Answer]) -> None:
    """What is planned from now on is written down as of this step."""
    plan = type(of).plan

    def heard() -> list[Action]:
        actions = plan(of)
        said.extend((type(action).__name__, number, action) for action in actions)
        return actions

    of.plan = heard


def _step(of: Any, name: str, arguments: Sequence[Any], more: Mapping[str, Any]) -> Any:
    """Raises whatever the world raises."""
    match name, *arguments:
        case "set", str(key), value:
            holder, _, field = key.rpartition(".")
            setattr(getattr(of, holder) if holder else of, field, value)
        case "restarted", *_:
            return of.restarted(**more)
        case (("apply" | "settle" | "store.apply"), *objects):
            do: Any = of.store.apply if name == "store.apply" else getattr(of, name)
            do(*map(own, map(plain, objects)), **more)
        case _:
            holder, _, method = name.rpartition(".")
            getattr(getattr(of, holder) if holder else of, method)(*arguments, **more)
    return None


def call(record: Json) -> Iterator[Answer]:
    """A message that a direction reads, and writes again; a function of the codec called."""
    kind, (module, _, name) = record["call"], record["call"].partition(".")
    found = attrgetter(name)(importlib.import_module(f"weft.wire.codec.{module}"))
    arguments = built(record["args"])
    try:
        value: Any = found(*arguments) if callable(found) else found.decode(*arguments)
    except (PeerError, DecodeError, ValueError, TypeError, OverflowError) as error:
        yield f"{kind} refuses", 0, _text(error)
        return
    yield kind, 0, value
    if not callable(found) and type(value) in found.messages:  # else it is sent on as it came
        yield f"{kind} written", 0, found.encode(value)


def body(record: Json) -> Iterator[Answer]:
    """What a target reads of it, or how it refuses it. A template may print where in memory something is."""
    found = plain(TARGETS[record["target"]].run(built(record["data"])))
    yield record["target"], 0, ADDRESS.sub("", found) if isinstance(found, str) else found


def one_manifest(record: Json) -> Iterator[Answer]:
    before = admit(own(record["before"]), lambda _: None) if record["before"] else None
    yield "admitted", 0, _judged(lambda: admit(own(record["wish"]), lambda _: before))


def conflict(record: Json) -> Iterator[Answer]:
    store = store_of(*map(own, record["there"]))
    yield "admitted", 0, _judged(lambda: Admission(store)(own(record["wish"]), store.find))


def _judged(judge: Callable[[], Any]) -> Json:
    try:
        return plain(judge())
    except Invalid as error:
        return _text(error)


def seed(record: Json) -> Iterator[Answer]:
    """A hash of every message between the simulated processes."""
    verdict = check_seed(record["seed"])
    yield "trace", record["seed"], [verdict.trace_hash, verdict.fault]


def files(_: Json) -> Iterator[Answer]:
    """The chart's renders, where helm is there, and the CRDs."""
    for name in (*chart.GOLDEN_SETS, *chart.PROFILES):
        try:
            rendered = chart.objects(chart.golden(chart.render(name)))
        except (chart.ToolMissing, chart.HelmRefused) as error:
            yield "render", name, _text(error)
            continue
        for obj in rendered:
            yield f"render {name}", f"{obj['kind']} {obj['metadata']['name']}", obj
    for path in sorted((ROOT / "charts/weft/files/crds").glob("*.yaml")):
        yield "crd", path.name, yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


KINDS: Mapping[str, Callable[[Json], Iterator[Answer]]] = {
    "machine": machine, "world": world, "call": call, "body": body, "manifest": one_manifest, "conflict": conflict,
    "seed": seed, "files": files,
}  # fmt: skip


def replay(record: Json) -> Iterator[Json]:
    """Lines of the answers to one record, with the same UUIDs each time. What the code raises is an answer."""
    name, numbers = f"{record['kind']} {record['name']}", count()
    try:
        with patch("uuid.uuid4", lambda: UUID(int=next(numbers))):
            for kind, at, value in KINDS[record["kind"]](record):
                yield [name, kind, plain(at), plain(value)]
    except Exception as error:  # noqa: BLE001 (a machine that breaks is a finding)
        yield [name, "raises", 0, _text(error)]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_CHARS]}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.differential.drive", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file to write, compressed")
    parser.add_argument("recordings", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    own_tree()
    write(options.out, (line for record in read(options.recordings) for line in replay(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
