"""Admission of objects on one machine, with the same refusals and messages as the API server and its schema.

`admit` judges an object by its fields (the types of `weft.api`, also the source of the CRDs). For an existing object it
also checks the immutable fields. `ObjectAdmission` adds the rules between objects (`weft_operator.core.validation`),
like the webhook in a cluster.
"""

from collections.abc import Callable
from typing import Any

from weft.api.manifests import ManifestError, parse_object
from weft.api.meta import immutable_changes
from weft_operator.core.resources import Object, Ref, parse
from weft_operator.core.state import DesiredState
from weft_operator.core.validation import validate
from weft_operator.errors import Cause, Invalid
from weft_operator.local.objects import ObjectStore, WatchEvent


class ObjectAdmission:
    """A judge of objects by all objects of a store. Called as `admit`; the same turn of the loop stores its result."""

    def __init__(self, store: ObjectStore) -> None:
        self._desired = DesiredState()
        for obj in store.objects():
            self._desired.put(parse(obj))
        store.listen(self._on_event)

    def __call__(self, manifest: Object, find: Callable[[Ref], Object | None]) -> Object:
        """Make the object to store. Raises Invalid with every objection."""
        admitted = admit(manifest, find)
        previous = find(Ref(admitted["kind"], admitted["metadata"]["namespace"], admitted["metadata"]["name"]))
        objections = validate(admitted, previous, self._desired).objections
        if objections:
            causes = tuple(
                Cause(objection.field, f"{objection.reason}: {objection.message}") for objection in objections
            )
            raise Invalid(_message(admitted, causes), causes)
        return admitted

    def _on_event(self, event: WatchEvent) -> None:
        resource = parse(event.object)
        if event.type == "DELETED":
            self._desired.drop(resource.meta.ref)
        else:
            self._desired.put(resource)


def admit(manifest: Object, find: Callable[[Ref], Object | None]) -> Object:
    """Make the object to store: every default written out, no status. Raises Invalid with every wrong field."""
    try:
        resource = parse_object(manifest)
    except ManifestError as error:
        causes = tuple(Cause(problem.field, problem.message) for problem in error.problems)
        raise Invalid(_message(manifest, causes), causes) from error
    if resource.kind == "APIKey":
        cause = Cause("kind", "APIKeys are for clusters; `weft key create` makes a key here")
        raise Invalid(_message(manifest, (cause,)), (cause,))
    ref = Ref(resource.kind, resource.metadata.namespace, resource.metadata.name)
    previous = find(ref)
    if previous is not None:
        changes = immutable_changes(_stored(previous), resource)  # pyright: ignore[reportArgumentType]
        causes = tuple(Cause(*_split(change)) for change in changes)
        if causes:
            raise Invalid(_message(manifest, causes), causes)
    return {name: value for name, value in resource.to_dict().items() if name != "status"}


def _stored(obj: Object) -> Any:
    return parse_object({name: value for name, value in obj.items() if name != "status"})


def _split(change: str) -> tuple[str, str]:
    field, _, message = change.partition(": ")
    return field, message


def _message(manifest: Object, causes: tuple[Cause, ...]) -> str:
    metadata: Any = manifest.get("metadata")
    name = str(metadata.get("name"))[:100] if isinstance(metadata, dict) else "?"
    message = "; ".join(f"{cause.field}: {cause.message}" if cause.field else cause.message for cause in causes)
    return f"{str(manifest.get('kind'))[:100]} {name!r} is invalid: {message}"
