"""vLLM's `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for tools that drive a server of adapters so.

A stack of `weft up` or `weft serve` has one controller, and its gateway may change the objects: loading publishes a
LoRAAdapter as `weft push` does, unloading deletes it. The files of a local folder are read at once, below the stack's
own folders alone, and sent to the depot. Elsewhere objects are the way, and the answer says so.
"""

import asyncio
import contextlib
import functools
import hashlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Literal

import httpx2
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from weft.api.fields import LABEL_PATTERN
from weft.api.meta import API_VERSION
from weft.api.readiness import is_ready, is_refused, state_of
from weft.api.source import REPOSITORY
from weft.domain.adapter import FILES, OPTIONAL_FILES, OTHER_FORMS
from weft_gateway.core.routes import ANY_NAMESPACE, UnknownVersion
from weft_gateway.errors import BadRequest, NotConfigured, NotFound, ParameterError, ServiceUnavailable
from weft_gateway.openai.adapters import store_adapter
from weft_gateway.openai.http_requests import caller_of, json_body
from weft_gateway.openai.schema import Strict, checked, object_of
from weft_gateway.shell.app_state import AppState, LoadedAdapter
from weft_gateway.shell.auth import Action
from weft_gateway.shell.objects_client import Object, ObjectRefused, ObjectsClient

LOAD_SECONDS = 120.0  # until requests are served by it
READ_BYTES = 1 << 20
LABEL_CHARS = 63


class LoadRequest(Strict):
    """`POST /v1/load_lora_adapter`, as in vLLM."""

    api = None

    lora_name: str = Field(min_length=1, max_length=253, description="what clients send as model")
    lora_path: str = Field(min_length=1, max_length=2048, description="a folder, hf://ORG/NAME[@REVISION], s3://...")
    load_inplace: bool = Field(False, description="an adapter that has the name gets this content")
    base_model_name: str | None = Field(None, description="absent: the only base that is served")
    is_3d_lora_weight: Literal[False] = Field(False, description="no experts in layers are served")


class AlreadyLoaded(ParameterError):
    """The name is taken. The type is vLLM's: KubeAI, which loads again and again, takes it for success."""

    kind, code = "InvalidUserInput", "adapter_already_loaded"


class UnloadRequest(Strict):
    """`POST /v1/unload_lora_adapter`, as in vLLM."""

    api = None

    lora_name: str = Field(min_length=1, max_length=253, description="of an adapter, however it was published")


async def load_lora_adapter(state: AppState, request: Request) -> Response:
    """Publish an adapter, and answer once requests are served by it."""
    objects = await _objects(state, request)
    params = checked(LoadRequest, object_of(await json_body(state, request, "")))
    with _controller_errors():
        async with state.loading(params.lora_name):
            await _load(state, objects, params)
    return PlainTextResponse(f"Success: LoRA adapter '{params.lora_name}' added successfully.")


async def unload_lora_adapter(state: AppState, request: Request) -> Response:
    """Delete an adapter, and answer once no request finds it."""
    objects = await _objects(state, request)
    name = checked(UnloadRequest, object_of(await json_body(state, request, ""))).lora_name
    with _controller_errors():
        async with state.loading(name):
            obj = _called(await objects.list("loraadapters"), name)
            if obj is None:
                raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            await objects.delete_adapter(obj)
            async with _in_time(f"The lora adapter '{name}' is deleted, and this gateway still serves it."):
                await state.routes_until(lambda: _uid_of(state, name) != obj["metadata"]["uid"])
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _objects(state: AppState, request: Request) -> ObjectsClient:
    """Return the client that changes objects, for an authorised caller. Raises ApiError."""
    await caller_of(state, request, Action.PUBLISH)
    if state.objects is None:
        raise NotConfigured(
            "This gateway loads and unloads no adapters by request: apply or delete a LoRAAdapter (`weft apply`, "
            "`kubectl apply`), or publish a folder with `weft push`."
        )
    return state.objects


async def _load(state: AppState, objects: ObjectsClient, params: LoadRequest) -> None:
    name = params.lora_name
    adapters = await objects.list("loraadapters")
    loaded_before = _called(adapters, name)
    if loaded_before and not params.load_inplace:
        text = f"The lora adapter '{name}' has already been loaded."
        help_ = "If you want to load the adapter in place, set 'load_inplace' to True."
        raise AlreadyLoaded(f"{text} {help_}", param="lora_name")
    obj = loaded_before or _new_adapter(
        name, _pool(await objects.list("servingpools"), params.base_model_name), adapters
    )
    namespace = obj["metadata"]["namespace"]
    source = _remote_source(params.lora_path, state.settings.adapter_roots) or await _stored_folder(
        state, params.lora_path, namespace
    )
    if source == obj["spec"].get("source") and not source["uri"].startswith("depot:"):
        text = "lora_path: the adapter has this source already; name another revision, as hf://ORG/NAME@COMMIT."
        raise ParameterError(text, param="lora_path", code="source_unchanged")  # it is read once
    spec = {key: value for key, value in obj["spec"].items() if key != "version"} | {"source": source}
    metadata = {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}  # a status may come
    made = await objects.apply({"apiVersion": API_VERSION, "kind": "LoRAAdapter", "metadata": metadata, "spec": spec})
    try:
        async with _in_time(f"The lora adapter '{name}' is not served within {LOAD_SECONDS:g} s."):
            served = await _until_served(state, objects, made)
    except BaseException:
        if loaded_before is None:  # what is not loaded does not stay
            with contextlib.suppress(ObjectRefused):  # it is gone already
                await objects.delete_adapter(made)
        raise
    for other in [other for other, loaded in state.loaded.items() if _uid_of(state, other) != loaded.uid]:
        del state.loaded[other]
    state.loaded[name] = LoadedAdapter(made["metadata"]["uid"], served["status"]["digest"], params.lora_path)


def _called(adapters: Sequence[Object], name: str) -> Object | None:
    return next((obj for obj in adapters if _model_name(obj) == name), None)


def _model_name(obj: Object) -> str:
    metadata = obj["metadata"]
    return obj["spec"].get("modelName") or f"{metadata['namespace']}/{metadata['name']}"


def _pool(pools: Sequence[Object], base: str | None) -> Object:
    """Return the only pool of this base model. Raises ParameterError."""
    names = {obj["spec"]["model"].get("name") or obj["metadata"]["name"]: obj for obj in pools}
    if base is None and len(names) == 1:
        return next(iter(names.values()))
    if base in names:
        return names[base]
    wrong = "no base of that name is served" if base else "several base models are served: name one" if names else ""
    served = f"there are: {', '.join(names)}" if names else "no base model is served"
    raise ParameterError("; ".join(filter(None, (wrong, served))) + ".", param="base_model_name")


def _new_adapter(name: str, pool: Object, adapters: Sequence[Object]) -> Object:
    """Make a LoRAAdapter without a source, under an unused name.

    `NAMESPACE/NAME` is that namespace's, whose keys may then ask for it, if the pool allows the namespace.
    """
    metadata, allowed = pool["metadata"], pool["spec"].get("allowedNamespaces", ())
    namespace, _, pool_name = name.rpartition("/")
    if not re.fullmatch(LABEL_PATTERN, namespace) or not ("*" in allowed or namespace in allowed):
        namespace, pool_name = metadata["namespace"], name
    label = re.sub(r"[^a-z0-9]+", "-", pool_name.lower()).strip("-")[: LABEL_CHARS - 9].strip("-") or "adapter"
    used_names = {obj["metadata"]["name"] for obj in adapters if obj["metadata"]["namespace"] == namespace}
    if label != pool_name or label in used_names:
        label = f"{label}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    reference = {"name": metadata["name"], "namespace": metadata["namespace"]}
    spec = {"poolRef": reference, "modelName": name, "baseModel": pool["spec"]["model"].get("name") or metadata["name"]}
    return {"metadata": {"namespace": namespace, "name": label}, "spec": spec}


def _remote_source(path: str, roots: Sequence[Path]) -> dict[str, str] | None:
    """An artifact's source; None: the path is of a folder below a root, as vLLM looks for one before a repository.

    Raises ParameterError.
    """
    if path.startswith("s3://"):
        return {"uri": path}
    match = REPOSITORY.fullmatch(path.removeprefix("hf://").removeprefix("hf:"))
    if match and not (path == match[0] and _is_folder(path, roots)):
        revision = {"revision": match["revision"]} if match["revision"] else {}
        return {"uri": f"hf:{match['name']}", **revision}
    if ":" in path.partition("/")[0]:
        text = "lora_path: takes a folder, hf://ORG/NAME[@REVISION] or s3://BUCKET/PREFIX."
        raise ParameterError(text, param="lora_path")
    return None


def _is_folder(path: str, roots: Sequence[Path]) -> bool:
    folder = Path(path)  # links in a circle are no folder, and `resolve` would raise
    return folder.is_dir() and any(folder.resolve().is_relative_to(root.resolve()) for root in roots)


async def _stored_folder(state: AppState, path: str, namespace: str) -> dict[str, str]:
    """The depot's copy of a folder's files, as they are now. Raises ApiError."""
    boundary = secrets.token_hex(16)
    form = f"multipart/form-data; boundary={boundary}"
    try:
        files = await asyncio.to_thread(_files_of, path, state.settings.adapter_roots)
        stored = await store_adapter(state, namespace, form, _form(files, boundary))
    except BadRequest as error:
        if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
            error.status = HTTPStatus.BAD_REQUEST  # as vLLM says it of files that are no adapter
        raise
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a user's folder that is not, a NUL
        raise ParameterError(f"lora_path: {path!r} cannot be read: {error}.", param="lora_path") from error
    return {"uri": stored["uri"]}


def _files_of(path: str, roots: Sequence[Path]) -> dict[str, Path]:
    """Return the files of an adapter's folder, links followed, all below one of the roots.

    Beside the roots nothing is looked at, and nobody learns what is there. Raises NotFound.
    """
    below = [root.resolve() for root in roots]
    names = (*FILES, *OPTIONAL_FILES, *OTHER_FORMS)
    home = path == "~" or path.startswith("~/")  # of this user: other names of users are not looked up
    folder = (Path(path).expanduser() if home else Path(path)).absolute()
    try:
        paths = {name: (folder / name).resolve() for name in names}
    except (OSError, RuntimeError):  # links in a circle
        paths = {}
    if not paths or not all(any(file.is_relative_to(root) for root in below) for file in paths.values()):
        message = f"is not below {' or '.join(map(str, roots))}" if roots else "is a folder, and this stack has none"
        raise NotFound(
            f"lora_path: {path!r} {message}: start the stack with a folder above it (`weft serve --adapters`, "
            "`weft up --file-root`), or send its files with `weft push`.",
            param="lora_path",
            code="path_not_allowed",
        )
    there = {name: file for name, file in paths.items() if file.is_file()}
    if missing := [name for name in FILES if name not in there]:
        instead = "".join(f" {name} is {form}." for name, form in OTHER_FORMS.items() if name in there)
        raise NotFound(f"lora_path: {path!r} has no {' and no '.join(missing)}.{instead}", param="lora_path")
    return {name: file for name, file in there.items() if name not in OTHER_FORMS}


async def _form(files: dict[str, Path], boundary: str) -> AsyncIterator[bytes]:
    for name, path in files.items():
        yield f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'.encode()
        with path.open("rb") as file:
            while data := await asyncio.to_thread(file.read, READ_BYTES):
                yield data
        yield b"\r\n"
    yield f"--{boundary}--\r\n".encode()


async def _until_served(state: AppState, objects: ObjectsClient, made: Object) -> Object:
    """The object once requests are served by it. Raises BadRequest if it is refused."""
    async with contextlib.aclosing(objects.changes(made)) as changes:
        while not is_refused(obj := await anext(changes)):  # what was there before may go on being served
            if is_ready(obj):
                pinned = f"{_model_name(obj)}@{obj['status']['digest']}"
                await state.routes_until(functools.partial(_is_routed, state, pinned))
                return obj
    raise BadRequest(f"The adapter is refused: {state_of(obj)}", code="adapter_refused")


def _is_routed(state: AppState, pinned: str) -> bool:
    try:
        return state.machine.routes.find(pinned, ANY_NAMESPACE) is not None
    except UnknownVersion:
        return False


def _uid_of(state: AppState, name: str) -> str | None:
    route = state.machine.routes.routes.get(name)
    return route.uid if route else None


@contextlib.asynccontextmanager
async def _in_time(late: str) -> AsyncGenerator[None]:
    """Raises ServiceUnavailable after LOAD_SECONDS."""
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            yield
    except TimeoutError as error:
        raise ServiceUnavailable(late, code="adapter_not_ready", retry_after_ms=1000) from error


@contextlib.contextmanager
def _controller_errors() -> Generator[None]:
    """Raises ApiError."""
    try:
        yield
    except ObjectRefused as error:
        raise BadRequest(f"The adapter is refused: {error}", code="adapter_refused") from error
    except (httpx2.HTTPError, OSError) as error:
        text = f"The stack's controller does not answer: {type(error).__name__}."
        raise ServiceUnavailable(text, code="controller_unavailable", retry_after_ms=1000) from error
