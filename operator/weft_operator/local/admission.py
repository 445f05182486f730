"""What may be stored: the same refusals, with the same words, as the API server and its schema give.

One object can be judged by its fields (the types of `weft.api`, from which the CRDs are made too) and, where it exists
already, by what must not change. Rules between objects (names, pools) are conditions, not refusals: objects may come in
any order.
"""

from collections.abc import Callable
from typing import Any

from weft.api import immutable_changes
from weft.api.manifests import ManifestError, parse_object
from weft_operator.errors import Cause, Invalid
from weft_operator.resources import Object, Ref


def admit(wish: Object, find: Callable[[Ref], Object | None]) -> Object:
    """The object to store: every default written out, no status. Raises Invalid with every wrong field."""
    try:
        resource = parse_object(wish)
    except ManifestError as error:
        causes = tuple(Cause(problem.field, problem.message) for problem in error.problems)
        raise Invalid(_message(wish, causes), causes) from error
    ref = Ref(resource.kind, resource.metadata.namespace, resource.metadata.name)
    before = find(ref)
    if before is not None:
        changes = immutable_changes(_stored(before), resource)  # pyright: ignore[reportArgumentType]
        causes = tuple(Cause(*_split(change)) for change in changes)
        if causes:
            raise Invalid(_message(wish, causes), causes)
    return {name: value for name, value in resource.to_dict().items() if name != "status"}


def _stored(obj: Object) -> Any:
    return parse_object({name: value for name, value in obj.items() if name != "status"})


def _split(change: str) -> tuple[str, str]:
    field, _, message = change.partition(": ")
    return field, message


def _message(wish: Object, causes: tuple[Cause, ...]) -> str:
    metadata: Any = wish.get("metadata")
    name = str(metadata.get("name"))[:100] if isinstance(metadata, dict) else "?"
    what = "; ".join(f"{cause.field}: {cause.message}" if cause.field else cause.message for cause in causes)
    return f"{str(wish.get('kind'))[:100]} {name!r} is invalid: {what}"
