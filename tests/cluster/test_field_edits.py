"""Fields of a pool and of an adapter are edited in any order while streams of another pool go on.

A sample of `harness.field_edits`; WEFT_TEST_SEED makes another one. What is refused is refused by the API server; what
is taken has a reason; with the first spec back the object is as it was, and nobody else has noticed anything.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import SEED
from harness.bad_manifests import pool
from harness.cluster.cluster import Cluster
from harness.crowd import assert_undisturbed, load, longest_pause
from harness.field_edits import Edit, right_edits, wrong_edits
from harness.installation import NAMESPACE, Installation
from harness.quickstart import Case, adapter_manifest, sure_cases
from weft_devcluster.api import is_so
from weft_devcluster.errors import Refused

Json = dict[str, Any]
MODELS = ("weft-quickstart", "acme/upper", "initech/cipher")
WIDTH, ROUNDS, EDITS = 4, 3, 5
FIRST: dict[str, list[Edit]] = {  # of each kind, before its sample
    "ServingPool": [
        (("lora", "maxRank"), 256),
        (("lora", "maxRank"), None),
        (("autoscaling",), {"minReplicas": 1, "maxReplicas": 1}),
        (("template",), {"env": [{"name": "WEFT_TEST", "value": "1"}], "labels": {"test": "edits"}}),
        (("advanced",), {"kvPages": 1}),
        (("template", "image"), "x y"),
        (("autoscaling",), None),
    ],
    "LoRAAdapter": [
        (("maxRank",), 256),
        (("maxRank",), None),
        (("canary",), {"source": {"uri": "file:adapters/json"}, "weight": 10}),
        (("tier",), "Disk"),
        (("poolRef", "name"), "absent"),
        (("source", "digest"), f"sha256:{'0' * 64}"),
        (("canary",), None),
    ],
}
PASSING = {"observedGeneration", "conditions", "lastScale", "slo"}
CONTROL_PLANE = ("operator", "scheduler", "supervisor", "predictor", "depot", "gateway")
MERGE, REPLACE = "application/merge-patch+json", "application/json-patch+json"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return sure_cases(MODELS, 24, seed=47)


@pytest.fixture(scope="module")
def objects(installation: Installation) -> Iterator[dict[str, Json]]:
    """A pool and an adapter of it, ready, by kind."""
    model = {"name": "edited", "uri": "file:model"}
    wish = pool("edited", NAMESPACE, model=model, replicas=1, lora={"maxRank": 32}, allowedNamespaces=["*"])
    where = {"name": "edited", "namespace": NAMESPACE}
    adapter = adapter_manifest("edited", "acme", "file:adapters/upper", poolRef=where, baseModel="edited")
    made = dict(zip(("ServingPool", "LoRAAdapter"), installation.plane.apply(wish, adapter), strict=True))
    for obj in made.values():
        settled(installation.plane, obj)
    yield made
    installation.plane.kubectl("delete", "lora", "edited", "-n", "acme")
    installation.plane.kubectl("delete", "spool", "edited", "-n", NAMESPACE)


@pytest.mark.parametrize("kind", ["ServingPool", "LoRAAdapter"])
async def test_an_object_whose_fields_were_edited_and_put_back_is_as_before_and_no_other_one_notices(
    installation: Installation, objects: dict[str, Json], cases: list[Case], kind: str
) -> None:
    plane, obj = installation.plane, objects[kind]
    before, others = await asyncio.to_thread(settled, plane, obj), await asyncio.to_thread(beside, installation)
    chosen = random.Random(f"{SEED} {kind}")
    right, wrong = right_edits(kind, most=1), wrong_edits(kind)
    rounds = ([*chosen.choices(right, k=EDITS), *chosen.choices(wrong, k=EDITS)] for _ in range(ROUNDS))
    async with load(installation.url, cases, f"edits-{kind.lower()}", width=WIDTH) as made:
        await made.until(lambda: len(made.streams) > 3 * WIDTH)
        for steps in (FIRST[kind], *rounds):
            for step in steps:
                print(*(".".join(step[0]), step[1], await asyncio.to_thread(outcome, plane, obj, step)))
            await asyncio.to_thread(put_back, plane, obj)
            await asyncio.to_thread(settled, plane, obj, before)
        after = len(made.streams)
        await made.until(lambda: len(made.streams) > after + 3 * WIDTH)
    print(f"{kind}: {longest_pause(made.streams)}")
    assert_undisturbed(made.streams)
    assert await asyncio.to_thread(beside, installation) == others
    assert "Traceback" not in await asyncio.to_thread(said, installation)


def outcome(plane: Cluster, obj: Json, step: Edit) -> str:
    """Return what became of an edit: why it was refused, or the reason that the object has for being Ready or not."""
    path, value = step
    spec: Any = value
    for name in reversed(path):
        spec = {name: spec}
    try:
        taken = plane.objects.request(
            "PATCH", plane.path_of(obj), {"spec": spec}, content=MERGE, query={"fieldValidation": "Strict"}
        )
    except Refused as error:
        if error.status not in (400, 403, 422):
            raise
        return f"refused: {error.said[:120]}"
    generation, reasons = taken["metadata"]["generation"], list[str]()

    def judged(found: Json) -> bool:
        status = found["status"]
        if status.get("observedGeneration", 0) >= generation:
            reasons[:] = [c["reason"] for c in status["conditions"] if c["type"] == "Ready"]
        return bool(reasons)

    until(plane, obj, judged, f"has a reason for {'.'.join(path)}: {value!r}")
    return reasons[0]


def put_back(plane: Cluster, obj: Json) -> None:
    operation = {"op": "replace", "path": "/spec", "value": obj["spec"]}
    plane.objects.request("PATCH", plane.path_of(obj), [operation], content=REPLACE)


def settled(plane: Cluster, obj: Json, before: Json | None = None) -> Json:
    """Wait until an object is ready, and as it was before. Returns its spec and what its status says."""
    seen: Json = {}

    def ready(found: Json) -> bool:
        seen.update({"spec": found["spec"], "status": lasting(found.get("status") or {})})
        return (is_so("Ready")(found) and not seen["status"].get("unavailableRunners")) and seen == (before or seen)

    until(plane, obj, ready, f"is ready, and as {before}" if before else "is ready")
    return seen


def lasting(status: Json) -> Json:
    """Return what of a status does not tell when, or by which pod."""
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
    return {**{key: value for key, value in status.items() if key not in PASSING}, "conditions": conditions}


def until(plane: Cluster, obj: Json, holds: Any, what: str) -> None:
    meta = obj["metadata"]
    plane.wait_until(obj["kind"].lower(), meta["name"], meta["namespace"], holds, what)


def beside(installation: Installation) -> Json:
    """Return the other objects, and the pods of the other pool."""
    found = [item for kind in ("servingpools", "loraadapters") for item in installation.plane.get(kind)["items"]]
    objects = {
        f"{item['kind']} {item['metadata']['name']}": (item["metadata"]["generation"], lasting(item["status"]))
        for item in found
        if item["metadata"]["name"] != "edited"
    }
    pods = installation.pods("app.kubernetes.io/component=runner,serving.weft.dev/pool=quickstart")
    return {**objects, "pods": sorted(pod["metadata"]["uid"] for pod in pods)}


def said(installation: Installation) -> str:
    """Return everything that the control plane's pods have logged."""
    pods = [pod for component in CONTROL_PLANE for pod in installation.names(component)]
    return "\n".join(installation.plane.kubectl("logs", pod, "-n", NAMESPACE) for pod in pods)
