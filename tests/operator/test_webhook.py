"""The rules between objects where they count: a real API server asks our webhook before it stores.

Handlers, rules, kopf's server and the watches that feed them are the shipped ones, in this process. The configuration
is the chart's but for the address: it names this machine, and only the namespaces of these tests.
"""

import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest
import yaml
from kubernetes.client import CustomObjectsApi
from kubernetes.client.exceptions import ApiException

from harness import chart
from harness.bad_manifests import Manifest
from harness.cluster.cluster import Cluster
from harness.conflicting_manifests import PASSING, PLATFORM, REFUSED, TENANT, Wish, base, in_namespaces, lora, slots
from harness.waiting import PATIENCE_S, wait_until
from weft.leadership.lease_api import load_configuration
from weft_devcluster.processes import free_ports
from weft_operator.core import DesiredState, Object, Ref, parse
from weft_operator.core.state import ObjectKey
from weft_operator.kubernetes import OWN, KubernetesWatches, admission

GROUP, VERSION = "serving.weft.dev", "v1alpha1"
PLURALS = {"ServingPool": "servingpools", "LoRAAdapter": "loraadapters"}
LABEL = "weft-webhook-test"


class Webhook:
    """Watches and webhook, on a loop in a thread of their own."""

    def __init__(self, control_plane: Cluster) -> None:
        self._control_plane = control_plane
        self._desired = DesiredState()
        self._changed = threading.Condition()
        self._seen: dict[Ref, tuple[str, str]] = {}  # uid and version of what was told last
        self._ready: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._work = self._loop.create_task(self._serve())
        (self.port,) = free_ports(1, control_plane.own_address)
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        self._ready.result(PATIENCE_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._work.cancel)
        self._thread.join(PATIENCE_S)

    def wait_for(self, ref: Ref, obj: Object | None) -> None:
        """Wait until the watch has told of exactly this version, or (None) that there is no such object any more."""
        wanted = (obj["metadata"]["uid"], obj["metadata"]["resourceVersion"]) if obj else None
        with self._changed:
            assert self._changed.wait_for(lambda: self._seen.get(ref) == wanted, PATIENCE_S), f"{ref} was not told"

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._work)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        configuration = await load_configuration(str(self._control_plane.kubeconfig))
        watches = KubernetesWatches(configuration, on_object=self._put, on_gone=self._drop, on_start=lambda: None)
        registry = watches.registry(OWN)
        admission.register(registry, self._desired)
        await watches.run_own(registry, cast("kopf.WebhookServer", self._serving()))

    def _serving(self) -> Callable[[Any], AsyncIterator[Any]]:
        """kopf's server, and a word when it listens."""
        pair = self._control_plane.authority.issue("webhook", "webhook", [self._control_plane.own_address])
        server = kopf.WebhookServer(
            addr=self._control_plane.own_address, port=self.port, certfile=pair.crt, pkeyfile=pair.key
        )

        async def serve(function: Any) -> AsyncIterator[Any]:
            async with server:
                async for config in server(function):
                    if not self._ready.done():
                        self._ready.set_result(None)
                    yield config

        return serve

    def _put(self, obj: Object) -> None:
        resource = parse(obj)
        self._desired.put(resource)
        with self._changed:
            self._seen[resource.meta.ref] = (resource.meta.uid, resource.meta.resource_version)
            self._changed.notify_all()

    def _drop(self, key: ObjectKey, _uid: str) -> None:
        ref = Ref(cast("Any", key.kind), key.namespace, key.name)
        self._desired.drop(ref)
        with self._changed:
            self._seen.pop(ref, None)
            self._changed.notify_all()


class World:
    """Two namespaces behind the webhook. What a row needs is put there, and gone again behind it."""

    def __init__(self, control_plane: Cluster, api: CustomObjectsApi, webhook: Webhook) -> None:
        self._api, self._webhook = api, webhook
        labels = {LABEL: "yes"}
        self.names = {name: control_plane.create_namespace(name, labels) for name in (PLATFORM, TENANT)}

    def placed(self, row: Wish) -> Wish:
        """Return the row in our namespaces."""
        there, wish = in_namespaces(row.there, self.names), in_namespaces(row.wish, self.names)
        says, warns = (in_namespaces(text, self.names) for text in (row.says, row.warns))
        return replace(row, there=there, wish=wish, says=says, warns=warns)

    def put(self, manifest: Manifest) -> Object:
        """Store an object, with its status, and deleted where it says so; and wait until the webhook knows."""
        wish = {name: value for name, value in manifest.items() if name not in ("status", "deleted")}
        stored, _ = self.apply(wish)
        if "status" in manifest:
            stored = self._api.patch_namespaced_custom_object_status(*_path(wish), {"status": manifest["status"]})
        if manifest.get("deleted"):
            self._api.delete_namespaced_custom_object(*_path(wish))
            stored = self._api.get_namespaced_custom_object(*_path(wish))
        self._webhook.wait_for(_ref(wish), stored)
        return stored

    def apply(self, wish: Manifest, *, dry_run: bool = False) -> tuple[Object, str]:
        """Create or replace an object. Returns what is stored, and what was warned."""
        options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        before = self.find(wish)
        if before is None:
            answer = self._api.create_namespaced_custom_object_with_http_info(*_path(wish)[:-1], wish, **options)
        else:
            wish = wish | {"metadata": wish["metadata"] | {"resourceVersion": before["metadata"]["resourceVersion"]}}
            answer = self._api.replace_namespaced_custom_object_with_http_info(*_path(wish), wish, **options)
        return answer[0], answer[2].get("Warning", "")

    def find(self, manifest: Manifest) -> Object | None:
        try:
            return self._api.get_namespaced_custom_object(*_path(manifest))
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def remove(self, manifest: Manifest) -> None:
        """Take an object away, finalizers or not, and wait until the webhook knows."""
        stored = self.find(manifest)
        if stored is None:
            return
        if stored["metadata"].get("finalizers"):
            patch = {"metadata": {"finalizers": None}}
            self._api.patch_namespaced_custom_object(*_path(manifest), patch)
        if self.find(manifest) is not None:
            self._api.delete_namespaced_custom_object(*_path(manifest))
        self._webhook.wait_for(_ref(manifest), None)


def _path(manifest: Manifest) -> tuple[str, str, str, str, str]:
    meta = manifest["metadata"]
    return GROUP, VERSION, meta["namespace"], PLURALS[manifest["kind"]], meta["name"]


def _ref(manifest: Manifest) -> Ref:
    return Ref(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])


def asked_when() -> list[Manifest]:
    """Return the chart's conditions for asking."""
    objects = yaml.safe_load_all((chart.GOLDEN / "default.yaml").read_text())
    (found,) = [obj for obj in objects if obj["kind"] == "ValidatingWebhookConfiguration"]
    one, other = [hook["matchConditions"] for hook in found["webhooks"]]
    assert one == other
    return one


def configuration(control_plane: Cluster, port: int, name: str = LABEL) -> Manifest:
    """Return a configuration like the chart's, for namespaces with our label, and with more patience."""
    authority = base64.b64encode(control_plane.authority.crt.read_bytes()).decode()
    hooks = [
        {
            "name": f"{plural}.{GROUP}",
            "clientConfig": {"url": f"https://{control_plane.own_address}:{port}{path}", "caBundle": authority},
            "rules": [
                {
                    "apiGroups": [GROUP],
                    "apiVersions": [VERSION],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": [plural],
                }
            ],
            "matchConditions": asked_when(),
            "namespaceSelector": {"matchLabels": {name: "yes"}},
            "failurePolicy": "Fail",
            "timeoutSeconds": 30,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        for plural, path in admission.PATHS.items()
    ]
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": hooks,
    }


@pytest.fixture(scope="module")
def webhook(control_plane: Cluster) -> Iterator[Webhook]:
    made = Webhook(control_plane)
    made.start()
    manifest = configuration(control_plane, made.port)
    control_plane.apply(manifest)
    yield made
    control_plane.kubectl("delete", "validatingwebhookconfiguration", manifest["metadata"]["name"])
    made.stop()


@pytest.fixture(scope="module")
def whole(control_plane: Cluster, webhook: Webhook) -> Iterator[World]:
    with control_plane.client() as client:
        made = World(control_plane, CustomObjectsApi(client), webhook)
        wait_until_asked(made)
        yield made
        for name in made.names.values():
            control_plane.delete_namespace(name)


def wait_until_asked(world: World) -> None:
    """Wait until the API server asks: it learns of a configuration a moment later, and until then asks nobody.

    Kopf learns late of resource definitions that are new: until then it answers for none of them.
    """
    single, wish = (in_namespaces(obj, world.names) for obj in (base(**slots(1)), lora("probe", pinned=True)))

    def is_put() -> bool:
        try:
            world.put(single)
        except ApiException as error:
            if not kind_is_unknown(error):
                raise
            return False
        return True

    def is_refused() -> bool:
        try:
            world.apply(wish, dry_run=True)
        except ApiException as error:
            return not kind_is_unknown(error)
        return False

    wait_until(is_put, "the webhook knows pools")
    wait_until(is_refused, "the API server asks the webhook")
    world.remove(single)


def kind_is_unknown(error: ApiException) -> bool:
    """True where the webhook answered that it does not know the kind, which the API server makes its own failure."""
    return error.status == 500 and "could not find the requested resource" in str(error.body)


@pytest.fixture
def place(whole: World) -> Iterator[Callable[[Wish], Wish]]:
    """Puts a row's world there, and takes everything away behind it."""
    placed: list[Manifest] = []

    def put(row: Wish) -> Wish:
        row = whole.placed(row)
        placed.extend((*row.there, row.wish))
        for manifest in row.there:
            whole.put(manifest)
        return row

    yield put
    for manifest in reversed(placed):
        whole.remove(manifest)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_would_break_others_is_refused(whole: World, place: Callable[[Wish], Wish], row: Wish) -> None:
    row = place(row)
    with pytest.raises(ApiException) as caught:
        whole.apply(row.wish)
    status = json.loads(str(caught.value.body))
    assert status["code"] == 422
    assert f"{PLURALS[row.wish['kind']]}.{GROUP}" in status["message"]
    assert f"{row.field}: {row.reason}: " in status["message"]
    assert row.says in status["message"]


@pytest.mark.parametrize("row", PASSING, ids=lambda row: row.name)
def test_what_breaks_nobody_passes(whole: World, place: Callable[[Wish], Wish], row: Wish) -> None:
    row = place(row)
    _, warned = whole.apply(row.wish)
    assert row.warns in warned
    assert bool(row.warns) == bool(warned)


def test_status_and_finalizers_of_a_refusable_object_are_written(
    control_plane: Cluster, whole: World, place: Callable[[Wish], Wish]
) -> None:
    """An object that came before the rule could be broken goes its way: status, finalizer, deletion."""
    held = lora("a", maxRank=32) | {
        "metadata": {"name": "a", "namespace": TENANT, "finalizers": ["serving.weft.dev/unload"]}
    }
    row = place(Wish("stored before its pool", (held,), base(lora={"maxRank": 16})))
    whole.put(row.wish)
    adapter = row.there[0]
    whole.put(adapter | {"status": {"modelName": "x"}})
    whole.put(adapter | {"deleted": True})
    whole.remove(adapter)
    assert whole.find(adapter) is None


def test_while_no_webhook_answers_writes_of_specs_are_refused_and_all_else_goes_on(control_plane: Cluster) -> None:
    name = "weft-webhook-away"
    namespace = control_plane.create_namespace("away", {name: "yes"})
    with control_plane.client() as client, socket.socket() as closed:
        closed.bind((control_plane.own_address, 0))  # nobody listens
        api = CustomObjectsApi(client)
        held = in_namespaces(lora("held"), {TENANT: namespace})
        held["metadata"]["finalizers"] = ["serving.weft.dev/unload"]
        api.create_namespaced_custom_object(*_path(held)[:-1], held)
        control_plane.apply(configuration(control_plane, closed.getsockname()[1], name))
        try:
            said = rejection(lambda: api.patch_namespaced_custom_object(*_path(held), {"spec": {"pinned": True}}))
            assert "failed calling webhook" in said
            api.patch_namespaced_custom_object(*_path(held), {"metadata": {"labels": {"edited": "yes"}}})
            api.delete_namespaced_custom_object(*_path(held))
            api.patch_namespaced_custom_object(*_path(held), {"metadata": {"finalizers": None}})
            with pytest.raises(ApiException, match="404"):
                api.get_namespaced_custom_object(*_path(held))
        finally:
            control_plane.kubectl("delete", "validatingwebhookconfiguration", name)
            control_plane.delete_namespace(namespace)


def rejection(write: Callable[[], Any]) -> str:
    """Return what is said once a write is refused: API servers learn of a configuration a moment later."""
    said: list[str] = []

    def is_refused() -> bool:
        try:
            write()
        except ApiException as refused:
            said.append(str(refused.body))
        return bool(said)

    wait_until(is_refused, "the API server asks the webhook")
    return said[0]
