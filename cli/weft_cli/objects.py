"""The commands `apply`, `get`, `describe` and `delete`."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft_cli.client import Object, ObjectApi
from weft_cli.errors import BadInput, CommandError, NotThere
from weft_cli.output import dump, headers, note, row, say, table

if TYPE_CHECKING:
    from weft_cli.runners import SupervisorClient

SINGULAR = {"loraadapters": "loraadapter", "servingpools": "servingpool", "apikeys": "apikey"}
PLURAL = {"LoRAAdapter": "loraadapters", "ServingPool": "servingpools", "APIKey": "apikeys"}
KINDS = {plural: kind for kind, plural in PLURAL.items()}
OTHER_NAMESPACE = "-n names another namespace"
RUNNER_HEADERS = ("RUNNER", "POOL", "READY", "SEQUENCES", "PAGES", "ADAPTERS", "ROLE", "ADDRESS")


def load_manifests(paths: Sequence[Path], done: str = "applied", *, defaults: bool = True) -> list[Object]:
    """Load every object of these files and folders. `-` is standard input, with at least one object.

    `done`: the word for what was not done. `defaults`: with those of what is not written. Raises BadInput with every
    problem.
    """
    from weft.api.manifests import STDIN, ManifestError, load

    if not paths:
        raise BadInput("nothing to read", "name a manifest or a folder with -f")
    try:
        documents = load(paths)
    except ManifestError as error:
        raise BadInput(str(error), f"nothing was {done}: correct the manifests, then again") from error
    if STDIN in paths and not documents:
        raise BadInput(f"<stdin>: no object to be {done}", "what writes into the pipe may have failed")
    if defaults:
        return [document.to_dict() for document in documents]
    return [
        document.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True) for document in documents
    ]


def apply(api: ObjectApi, paths: Sequence[Path]) -> None:
    """Apply each object in order. A refused object does not stop the next objects."""
    objects, refused = load_manifests(paths), list[CommandError]()
    for obj, result in zip(objects, api.apply(objects), strict=True):
        if isinstance(result, CommandError):
            refused.append(result)
        else:
            say(f"{_label(obj)} {result}")
    if refused:
        wrong = all(isinstance(error, BadInput) for error in refused)
        raise (BadInput if wrong else CommandError)("\n".join(error.message for error in refused))


def get(api: ObjectApi, kind: str, name: str | None, namespace: str | None, form: str, *, watch: bool = False) -> None:
    """Print objects; with `watch` go on printing what changes. `namespace` None: all of them."""
    items, version = _chosen(api, kind, name, namespace)
    printer = _printer(kind, form, all_namespaces=namespace is None)
    if not watch:
        return printer(items, True) if items or form in ("json", "yaml") else _none_found(api, kind, namespace)
    if items:
        printer(items, True)
    for event in api.watch(kind, namespace, version):
        if event["type"] == "ERROR":
            raise CommandError(event["object"]["message"])
        if name in (None, event["object"]["metadata"]["name"]):
            printer([event["object"]], not items)
            items = [event["object"]]
    return None


def describe(
    api: ObjectApi, supervisor: Callable[[], "SupervisorClient"], kind: str, name: str, namespace: str
) -> None:
    """Describe one object. Without access to the supervisor the description has only the object."""
    from weft_cli.describe import describe_adapter, describe_key, describe_pool, describe_runner
    from weft_cli.runners import RunnerRow, list_runners

    if kind == "runners":
        found = next((runner for runner in list_runners(supervisor()) if runner.is_called(name)), None)
        if found is None:
            raise CommandError(f"there is no runner {name}", "`weft get runners` lists them")
        return say("\n".join(describe_runner(found)))
    try:
        obj = api.get(kind, namespace, name)
    except NotThere as error:
        raise NotThere(error.message, OTHER_NAMESPACE) from error
    if kind == "apikeys":
        return say("\n".join(describe_key(obj, time.time())))
    describer, runners, unknown = describe_adapter if kind == "loraadapters" else describe_pool, list[RunnerRow](), ""
    try:
        runners = list_runners(supervisor())
    except CommandError as error:
        unknown = f"not known: {error.message}"
    return say("\n".join(describer(obj, runners, time.time(), unknown)))


def delete(api: ObjectApi, objects: Sequence[Object], hint: str = "") -> None:
    """Delete each object, by kind, namespace and name. `hint`: the remedy for a missing object."""
    failures: list[CommandError] = []
    for obj, result in zip(objects, api.delete(objects), strict=True):
        if isinstance(result, CommandError):
            failures.append(result)
        else:
            say(f"{SINGULAR[PLURAL[obj['kind']]]}/{obj['metadata']['name']} {result}")
    if failures:
        missing = any(isinstance(error, NotThere) for error in failures)
        raise CommandError("\n".join(error.message for error in failures), hint if missing else "")


def to_delete(paths: Sequence[Path]) -> list[Object]:
    """List the objects of these manifests, adapters before their pools."""
    return sorted(load_manifests(paths, "deleted"), key=lambda obj: obj["kind"] == "ServingPool")


def named(plural: str, namespace: str, names: Sequence[str]) -> list[Object]:
    """Make objects of typed names. Invalid text is not an object's name either."""
    metas = [{"namespace": _text(namespace), "name": _text(name)} for name in names]
    return [{"kind": KINDS[plural], "metadata": meta} for meta in metas]


def _text(typed: str) -> str:
    return typed.encode(errors="surrogateescape").decode(errors="replace")


def _chosen(api: ObjectApi, kind: str, name: str | None, namespace: str | None) -> tuple[list[Object], str]:
    items, version = api.list(kind, namespace)
    if name is None:
        return items, version
    matches = [item for item in items if item["metadata"]["name"] == name]
    if not matches:
        scope = f"namespace {namespace}" if namespace else "any namespace"
        raise CommandError(f"there is no {SINGULAR[kind]} {name!r} in {scope}", f"{OTHER_NAMESPACE}, -A is all")
    return matches, version


def _printer(kind: str, form: str, *, all_namespaces: bool) -> Callable[[list[Object], bool], None]:
    """Make the function that prints some objects; with a header the first time."""
    wide = form == "wide"
    header_cells = (*(("NAMESPACE",) if all_namespaces else ()), *headers(KINDS[kind], wide=wide))
    widths = [0] * len(header_cells)

    def print_table(items: list[Object], header: bool) -> None:
        now = time.time()
        prefix = [(item["metadata"]["namespace"],) if all_namespaces else () for item in items]
        rows = [(*leading, *row(item, now, wide=wide)) for leading, item in zip(prefix, items, strict=True)]
        lines = table(header_cells, rows, widths)
        widths[:] = [max(pair) for pair in zip(widths, _widths(rows), strict=True)]
        say("\n".join(lines if header else lines[1:]))

    def print_whole(items: list[Object], header: bool) -> None:
        document: Any = items[0] if len(items) == 1 else {"apiVersion": "v1", "kind": "List", "items": items}
        say(("---\n" if form == "yaml" and not header else "") + dump(document, form))

    return print_whole if form in ("json", "yaml") else print_table


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]


def _none_found(api: ObjectApi, kind: str, namespace: str | None) -> None:
    elsewhere: list[Object] = []
    with contextlib.suppress(CommandError):  # who may look in one namespace alone
        elsewhere = api.list(kind)[0] if namespace else []
    scope = f" in namespace {namespace}" if namespace else ""
    hint = f" ({len(elsewhere)} in other namespaces: -A shows them)" if elsewhere else ""
    note(f"No {kind} found{scope}{hint}.")


def get_runners(supervisor: "SupervisorClient", name: str | None, namespace: str | None, form: str) -> None:
    """Print the runners of a namespace: they are where their pool is."""
    from weft_cli.runners import list_runners

    scope = f" in namespace {namespace}" if namespace else ""
    near = [runner for runner in list_runners(supervisor) if namespace in (None, runner.pool.partition("/")[0])]
    runners = [runner for runner in near if name is None or runner.is_called(name)]
    if name is not None and not runners:
        raise CommandError(f"there is no runner {name!r}{scope}", "`weft get runners` lists them")
    if form in ("json", "yaml"):
        say(dump([runner.message for runner in runners], form))
    elif runners:
        shown = RUNNER_HEADERS if form == "wide" else RUNNER_HEADERS[:-1]
        say("\n".join(table(shown, [runner.row()[: len(shown)] for runner in runners])))
    else:
        note(f"No runners found{scope}.")


def _label(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{SINGULAR[PLURAL[obj['kind']]]}/{meta['name']} ({meta['namespace']})"
