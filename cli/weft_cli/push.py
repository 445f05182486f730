"""The command `weft push`: an adapter's files go through the gateway into the depot, then its object is published."""

import contextlib
import http.client
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from weft.api.readiness import is_ready, is_refused, state_of
from weft.domain.adapter import FILES, OPTIONAL_FILES, OTHER_FORMS
from weft_cli.client import Object, ObjectApi
from weft_cli.errors import BadInput, Changed, CommandError, NotThere
from weft_cli.gateway import gateway_client, link_errors, refusal_error
from weft_cli.output import note, say

ATTEMPTS = 10  # the controller writes the status of the same object meanwhile
GATEWAY_PAUSE_S = 0.02  # the route table reaches it a moment after the status
SCHEME = "depot:"
NONE = "none"


@dataclass(frozen=True, slots=True)
class Publication:
    """The publication of a content: its adapter and its condition."""

    namespace: str
    name: str
    version: str | None = None
    if_digest: str | None = None
    keep: int | None = None
    pool: str | None = None


def push(api: ObjectApi, url: str, key: str | None, folder: Path, publication: Publication, wait_s: float) -> None:
    """Upload, publish, wait until requests are served by it. Raises CommandError."""
    started = time.monotonic()
    with gateway_client(url, key) as gateway, link_errors(url):
        stored = upload(gateway, folder, publication.namespace)
        uploaded = time.monotonic()
        publish(api, stored["source"]["uri"], publication)
        say(stored["id"])
        if wait_s:
            _wait(api, gateway, publication, stored["id"], wait_s)
            took = f"uploaded in {uploaded - started:.2f} s, served after {time.monotonic() - started:.2f} s"
            note(f"loraadapter/{publication.name} ({publication.namespace}): {stored['bytes']} bytes {took}")


def upload(gateway: httpx2.Client, folder: Path, namespace: str) -> Mapping[str, Any]:
    """Send the files. Returns the content as the gateway names it: id, bytes, source. Raises CommandError."""
    for name in FILES:
        if not (folder / name).is_file():
            hints = [f"{file} is {form}" for file, form in OTHER_FORMS.items() if (folder / file).is_file()]
            help_ = next(iter(hints), "an adapter is a folder as PEFT's save_pretrained writes it")
            raise BadInput(f"{folder} has no {name}", help_)
    with contextlib.ExitStack() as stack:
        names = (*FILES, *(name for name in OPTIONAL_FILES if (folder / name).is_file()))
        files = {name: (name, stack.enter_context((folder / name).open("rb"))) for name in names}
        response = gateway.put("/v1/adapters", params={"namespace": namespace}, files=files)
        if response.status_code != 200:
            raise refusal_error(response.content, response.status_code, "is the gateway older than this command?")
        return response.json()


def publish(api: ObjectApi, uri: str, publication: Publication) -> None:
    """Make the content the adapter's. Raises Changed if `if_digest` does not hold, NotThere, CommandError."""
    for attempt in range(ATTEMPTS):
        previous = _find(api, publication)
        _check(previous, publication)
        [result] = api.apply([_object(previous, uri, publication)])
        if not isinstance(result, CommandError):
            return
        if not isinstance(result, Changed) or attempt == ATTEMPTS - 1:
            raise result
        if previous is not None and "deletionTimestamp" in previous["metadata"]:
            raise result


def content_of(obj: Object) -> str:
    """Return the digest of an adapter, present or named by its source; "" for an unknown digest."""
    source, status = obj["spec"]["source"], obj.get("status", {})
    if source["uri"].startswith(SCHEME):
        return source["uri"].removeprefix(SCHEME)
    current = status.get("observedGeneration") == obj["metadata"]["generation"]
    return source.get("digest") or (status.get("digest", "") if current else "")


def _find(api: ObjectApi, publication: Publication) -> Object | None:
    try:
        return api.get("loraadapters", publication.namespace, publication.name)
    except NotThere:
        return None


def _check(previous: Object | None, publication: Publication) -> None:
    expected_digest, name = publication.if_digest, f"{publication.namespace}/{publication.name}"
    if expected_digest is not None:
        digest = content_of(previous) or "another content" if previous else NONE
        if expected_digest != digest:
            there = f"has {digest}" if previous else "does not exist"
            raise Changed(
                f"LoRAAdapter {name} {there}, not {expected_digest}: nothing was published", "look, then push again"
            )
    if previous is None and publication.pool is None:
        raise NotThere(f"there is no LoRAAdapter {name}", "name the pool that is to serve it with --pool, or apply it")
    if previous is not None and publication.pool is not None:
        reference = previous["spec"]["poolRef"]
        pool = "/".join((reference.get("namespace", publication.namespace), reference["name"]))
        if pool != (publication.pool if "/" in publication.pool else f"{publication.namespace}/{publication.pool}"):
            help_ = "leave out --pool, or edit spec.poolRef first"
            raise Changed(
                f"LoRAAdapter {name} is in the pool {pool}, not {publication.pool}: nothing was published", help_
            )


def _object(previous: Object | None, uri: str, publication: Publication) -> Object:
    """Make the adapter with the content. The version that was read is part of it, so a change in between is noticed."""
    if previous is None:
        namespace, _, name = (publication.pool or "").rpartition("/")
        pool = {"name": name} | ({"namespace": namespace} if namespace else {})
        metadata = {"namespace": publication.namespace, "name": publication.name}
        spec: dict[str, Any] = {"poolRef": pool}
        kind = {"apiVersion": "serving.weft.dev/v1alpha1", "kind": "LoRAAdapter"}
    else:
        kind = {name: previous[name] for name in ("apiVersion", "kind")}
        metadata, spec = previous["metadata"], {k: v for k, v in previous["spec"].items() if k != "version"}
    spec = {**spec, "source": {"uri": uri}}
    if publication.version is not None:
        spec["version"] = publication.version
    if publication.keep is not None:
        spec["revisionHistoryLimit"] = publication.keep
    return {**kind, "metadata": metadata, "spec": spec}


def _wait(api: ObjectApi, gateway: httpx2.Client, publication: Publication, digest: str, wait_s: float) -> None:
    """Wait until requests get that content. Raises CommandError: refused, or not served in time."""
    deadline = time.monotonic() + wait_s
    items, version = api.list("loraadapters", publication.namespace)
    obj = next((item for item in items if item["metadata"]["name"] == publication.name), None)
    changes = api.watch("loraadapters", publication.namespace, version, wait_s)
    while obj is not None and content_of(obj) == digest:
        if is_refused(obj):
            raise CommandError(state_of(obj))
        if is_ready(obj) and obj["status"].get("digest") == digest:
            break
        if time.monotonic() > deadline:
            raise CommandError(f"{state_of(obj)}: not served within {wait_s:g} s")
        obj = _next_of(obj, changes)
    else:
        name = f"{publication.namespace}/{publication.name}"
        raise Changed(f"LoRAAdapter {name} was deleted or published by another meanwhile")
    model = quote(f"{obj['status']['modelName']}@{digest}", safe="/@:")
    while gateway.get(f"/v1/models/{model}").status_code == http.client.NOT_FOUND:
        if time.monotonic() > deadline:
            raise CommandError(f"the gateway does not serve {digest} within {wait_s:g} s")
        time.sleep(GATEWAY_PAUSE_S)


def _next_of(obj: Object, changes: Iterator[Object]) -> Object | None:
    """The object's next state, or as it is when the changes end; None: it is gone."""
    uid = obj["metadata"]["uid"]
    for event in changes:
        if event["type"] == "ERROR":
            raise CommandError(event["object"]["message"])
        if event["object"]["metadata"]["uid"] == uid:
            return None if event["type"] == "DELETED" else event["object"]
    return obj
