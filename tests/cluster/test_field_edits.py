"""Fields of a pool and of its adapter are edited and put back beside streams of another pool, which notices nothing.

As in `tests/unit/operator/test_field_edits.py`, with pods: a sample of the edits, one after the other, whether what
was before has come to rest or not.
"""

import asyncio
import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import SEED
from harness.crowd import assert_undisturbed, load, longest_pause
from harness.field_edits import Edit, edited, edits
from harness.installation import NAMESPACE, Installation
from harness.operator.stage import is_so
from harness.quickstart import sure_cases
from weft_devcluster.errors import Refused

MODELS = ("weft-quickstart", "acme/upper")
WIDTH = 4
POOL, ADAPTER = ("servingpool", "edited"), ("loraadapter", "edited")
OF_POOL, OF_ADAPTER = 30, 20  # edits
JSON_PATCH = "application/json-patch+json"
REFUSALS = ("is invalid", "denied the request", "BadRequest")
WIDER: list[Edit] = [(("lora", "maxRank"), 256), (("lora", "maxRank"), None)]


class Objects:
    """A pool of its own, with one runner, and an adapter."""

    def __init__(self, installation: Installation) -> None:
        self._plane = installation.plane
        pool = self._plane.get("servingpool", "quickstart", NAMESPACE)
        model = pool["spec"]["model"] | {"name": "weft-edited"}
        spec = pool["spec"] | {"model": model, "replicas": 1}
        self.apply("ServingPool", spec)
        self.apply(
            "LoRAAdapter",
            {"poolRef": {"name": "edited"}, "baseModel": "weft-edited", "source": {"uri": "file:adapters/upper"}},
        )
        self.settle()

    def apply(self, kind: str, spec: dict[str, Any]) -> None:
        metadata = {"name": "edited", "namespace": NAMESPACE}
        self._plane.apply({"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec})

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self._plane.get(kind, name, NAMESPACE)

    def settle(self) -> None:
        """Both are Ready, as of their present specs."""
        for kind, name in (POOL, ADAPTER):
            self._plane.wait_until(kind, name, NAMESPACE, is_so("Ready"), "is ready")

    def replace(self, obj: dict[str, Any]) -> str | None:
        """Write this spec in the place of whatever is there; what the API server says where it refuses it."""
        patch = [{"op": "replace", "path": "/spec", "value": obj["spec"]}]
        query = {"fieldValidation": "Strict"}
        try:
            self._plane.objects.request("PATCH", self._plane.path_of(obj), patch, content=JSON_PATCH, query=query)
        except Refused as error:
            return str(error)
        return None

    def deployed(self) -> dict[str, Any]:
        """What runs for the pool."""
        listed = self._plane.get("deployments", namespace=NAMESPACE, selector="serving.weft.dev/pool=edited")
        return {obj["metadata"]["name"]: obj["spec"] for obj in listed["items"]}


@pytest.fixture
def objects(installation: Installation) -> Iterator[Objects]:
    yield Objects(installation)
    installation.plane.kubectl("delete", "lora/edited", "spool/edited", "-n", NAMESPACE)


def edit_and_put_back(objects: Objects, rng: random.Random) -> None:
    first = {kind: copy.deepcopy(objects.get(kind, name)) for kind, name in (POOL, ADAPTER)}
    drawn = [(POOL, edit) for edit in [*WIDER, *rng.sample(edits("ServingPool"), OF_POOL)]]
    drawn += [(ADAPTER, edit) for edit in rng.sample(edits("LoRAAdapter"), OF_ADAPTER)]
    rng.shuffle(drawn)
    for (kind, name), (path, value) in drawn:
        said = objects.replace(edited(objects.get(kind, name), path, value))
        assert said is None or any(word in said for word in REFUSALS), (path, value, said)
    for kind, obj in first.items():
        assert objects.replace(obj) is None, kind


async def test_edited_and_put_back_they_are_as_before_and_nobody_else_notices(
    installation: Installation, objects: Objects
) -> None:
    before, rng = objects.deployed(), random.Random(SEED)
    beside = installation.plane.get("servingpool", "quickstart", NAMESPACE)
    async with load(installation.url, sure_cases(MODELS, 16, seed=47), "edits", width=WIDTH) as made:
        await made.until(lambda: len(made.streams) > 2 * WIDTH)
        await asyncio.to_thread(edit_and_put_back, objects, rng)
        await asyncio.to_thread(objects.settle)
    print(f"edits: {longest_pause(made.streams)}")
    assert_undisturbed(made.streams)
    assert objects.deployed() == before
    after = installation.plane.get("servingpool", "quickstart", NAMESPACE)
    assert after["metadata"]["generation"] == beside["metadata"]["generation"]
    logs = [installation.plane.kubectl("logs", name, "-n", NAMESPACE) for name in installation.names("operator")]
    assert not [line for log in logs for line in log.splitlines() if "Traceback" in line]
