"""`weft serve`: a model and adapters from folders or repositories, without manifests of one's own, or a pool's file.

The command line becomes a ServingPool and a LoRAAdapter each (`--print` shows them), which a stack of their own serves.
What the manifest of `-f` says of the pool stays; the rest is chosen as for a MODEL.
A stack of `weft serve` serves what its command line names and nothing else; `weft up` keeps what was applied.
"""

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.api.manifests import ManifestError, parse_object
from weft.api.meta import API_VERSION
from weft.api.servingpool import PAGE_TOKENS
from weft.api.source import REPOSITORY
from weft.artifacts.adapter_config import parse_adapter_config
from weft.domain.model.config import parse_model_config
from weft.domain.model.errors import Refused
from weft.domain.model.spec import ModelSpec
from weft_cli.client import Object
from weft_cli.errors import BadInput
from weft_cli.objects import load_manifests
from weft_cli.output import dump, note, say
from weft_operator.local.components import Options
from weft_runner.gpu_driver import finds_gpu, gpu_bytes
from weft_runner.memory_estimate import MemoryLimit, available_memory, estimate_memory, page_bytes

NAMESPACE = "default"
MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# What is served of a repository: no weights in other formats, no code.
REPOSITORY_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
SEQUENCES, MIN_RANK, MAX_KV_PAGES = 32, 64, 1 << 20
GPU_SHARE = 0.9  # of its memory, as runners take by default
PROCESS_BYTES = 1 << 30  # of the stack beside weights and pages
LABEL = 63


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """The command line: a model, or the file of a pool."""

    model: str | None
    folders: Sequence[Path]  # of adapters
    adapters: Sequence[str]
    name: str | None = None
    offload: Path | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeSource:
    """A place of files: `uri` as a manifest has it; `folder` where they are on this machine.

    `repository`: the ORG/NAME that is read through the user's cache.
    """

    uri: str
    name: str  # as its owner calls it: a folder's name, ORG/NAME
    revision: str | None = None
    folder: Path | None = None
    repository: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter to serve. `name`: what clients send as `model`. `written`: its manifest."""

    name: str
    source: ServeSource
    written: Object | None = None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The objects that the command line asks for. `written`: the pool's manifest.

    `notes`: of each folder that is served by another name than its own, or not at all.
    """

    model: ServeSource
    name: str
    adapters: Sequence[AdapterFolder]
    notes: Sequence[str] = ()
    offload: Path | None = None
    written: Object | None = None


def serve(
    request: ServeRequest,
    *,
    data_dir: Path,
    port: int,
    auth: bool,
    executor: str | None,
    log_level: str,
    print_only: bool,
    exit_after: bool,
    allowed_hosts: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
    prefix_sharing: bool = True,
) -> int:
    """Serve what the command line names. Returns the exit code; raises CommandError."""
    served, gpu = parse(request), _computes_on_gpu(executor)
    if served.notes:
        note("\n  ".join(("weft: not every folder is served by its own name:", *served.notes)))
    if print_only:
        print_manifests(manifests(served, gpu=gpu))
        return 0
    from weft_cli.up import run_stack

    roots = (Path.cwd(), *(folder.absolute() for folder in request.folders))
    options = Options(
        data_dir, port, auth, Path("/"), executor, log_level, allowed_hosts=allowed_hosts, cors_origins=cors_origins,
        prefix_sharing=prefix_sharing, adapter_roots=roots,
    )  # fmt: skip
    return run_stack(options, manifests(downloaded(served), gpu=gpu), exit_after=exit_after, keep=False)


def parse(request: ServeRequest) -> ServedModels:
    """Read the command line. An unservable folder below `--adapters` stops no further folder. Raises BadInput."""
    if (request.model is None) == (request.file is None):
        raise BadInput("what is to be served?", "either MODEL, or -f with the manifest of a ServingPool")
    if request.name and request.file:
        raise BadInput("--name is for a MODEL", f"write it into {request.file}, as spec.model.name")
    notes, written = list[str](), _written(request.file) if request.file is not None else []
    pool = written[0] if written else None
    model = _source_of(pool) if pool else parse_source(request.model or "", "model")
    name = _name_of(pool) if pool else request.name or _own_name(model, notes)
    named = [AdapterFolder(_name_of(obj), _source_of(obj), obj) for obj in written[1:]]
    named += [parse_adapter(text, notes) for text in request.adapters]
    below = [source for folder in request.folders for source in adapters_below(folder)]
    adapters = _different(below, {name, *(adapter.name for adapter in named)}, notes)
    offload = Path(os.path.normpath(request.offload.absolute())) if request.offload else None
    return ServedModels(model, name, [*adapters, *named], notes, offload, pool)


def _written(file: Path) -> list[Object]:
    """Read a manifest's or folder's pool, then its adapters, without defaults; `file:` from / on. Raises BadInput."""
    objects = load_manifests([file], "served", defaults=False)
    objects.sort(key=lambda obj: obj["kind"] != "ServingPool")
    kinds = [obj["kind"] for obj in objects]
    if kinds[:1] != ["ServingPool"] or {*kinds[1:]} - {"LoRAAdapter"}:
        raise BadInput(f"{file} has {', '.join(kinds) or 'no object'}", "it takes one ServingPool, and LoRAAdapters")
    folder = Path() if file == Path("-") else file if file.is_dir() else file.parent
    return [_from_root({"apiVersion": API_VERSION, "kind": obj["kind"], **obj}, folder) for obj in objects]


def _from_root(value: Any, folder: Path) -> Any:
    """Rewrite each `uri: file:PATH` of a manifest from / on, if it is from the folder on. Raises BadInput."""
    if isinstance(value, list):
        return [_from_root(entry, folder) for entry in value]
    if not isinstance(value, dict):
        return value
    uri = value.get("uri")
    if isinstance(uri, str) and uri.startswith("file:"):
        path = uri.removeprefix("file:").lstrip("/")
        path_found = next((root / path for root in (folder.absolute(), Path("/")) if (root / path).is_dir()), None)
        if path_found is None:
            raise BadInput(f"{uri}: there is no folder {folder / path}, nor /{path}")
        return {**value, "uri": f"file:{os.path.normpath(path_found).lstrip('/')}"}
    return {name: _from_root(entry, folder) for name, entry in value.items()}


def _source_of(obj: Object) -> ServeSource:
    """Read an object's source. Only the depot knows a repository's needs, except its revision."""
    files = _files_of(obj)
    uri, revision = files["uri"], files.get("revision")
    folder = Path("/", uri.removeprefix("file:")) if uri.startswith("file:") else None
    plain = uri.startswith("hf:") and not files.keys() & {"digest", "credentialsRef"}
    match = REPOSITORY.fullmatch(uri.removeprefix("hf:")) if plain else None
    return ServeSource(uri, uri, revision, folder, match["name"] if match else None)


def _name_of(obj: Object) -> str:
    """Return the name for clients' `model`."""
    spec, meta = obj["spec"], obj["metadata"]
    if obj["kind"] == "ServingPool":
        return spec["model"].get("name") or meta["name"]
    return spec.get("modelName") or f"{meta['namespace']}/{meta['name']}"


def parse_source(text: str, subject: str) -> ServeSource:
    """Read a folder, ORG/NAME[@REVISION] of a Hugging Face hub, or a URI of a manifest. Raises BadInput."""
    folder = Path(text).expanduser()
    if folder.is_dir():
        at = Path(os.path.normpath(folder.absolute()))
        return ServeSource(f"file:{str(at).lstrip('/')}", at.name, folder=at)
    if match := REPOSITORY.fullmatch(text.removeprefix("hf:")):
        return ServeSource(f"hf:{match['name']}", match["name"], match["revision"], repository=match["name"])
    if text.startswith(("s3://", "oci://", "depot:sha256:")):
        return ServeSource(text, text.rstrip("/").rpartition("/")[2].partition("@")[0].partition(":")[0] or text)
    missing = f"there is no folder {folder}" if not folder.exists() else f"{folder} is no folder"
    raise BadInput(
        f"{subject} {text!r}: {missing}",
        "name a folder, ORG/NAME of a Hugging Face hub, s3://BUCKET/PREFIX or oci://HOST/REPOSITORY:TAG",
    )


def adapters_below(folder: Path) -> list[ServeSource]:
    """List each folder there that is not hidden and has an adapter_config.json. Raises BadInput if none has."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise BadInput(f"--adapters {folder} is an adapter itself", f"name it with --adapter {folder}")
    try:
        folders = sorted(path.parent for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    except OSError as error:
        raise BadInput(f"--adapters {folder}: {error.strerror}") from error
    folders = [path for path in folders if not path.name.startswith(".")]
    if not folders:
        raise BadInput(f"--adapters {folder}: no folder in it has an {ADAPTER_CONFIG}")
    return [parse_source(str(path), "--adapters") for path in folders]


def parse_adapter(text: str, notes: list[str]) -> AdapterFolder:
    """Read `NAME=SOURCE`, or `SOURCE` with its own name. Raises BadInput."""
    name, equals, place = text.partition("=")
    if not equals or Path(text).is_dir():
        source = parse_source(text, "--adapter")
        return AdapterFolder(_own_name(replace(source, name=source.name.rpartition("/")[2]), notes), source)
    return AdapterFolder(name, parse_source(place, "--adapter"))


def legal_name(name: str) -> str:
    """Make of a name what a request's `model` may be, as near to it as there is; "" where nothing of it may."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._:/-]+", "-", plain).strip("._:/-")


def _own_name(source: ServeSource, notes: list[str]) -> str:
    name = legal_name(source.name)
    if not name:
        raise BadInput(f"{source.name!r} can be no model's name", "give one: --name NAME, --adapter NAME=SOURCE")
    if name != source.name:
        notes.append(f"{source.folder or source.uri} is served as {name}")
    return name


def _different(sources: Iterable[ServeSource], used_names: set[str], notes: list[str]) -> list[AdapterFolder]:
    """Give adapters unused names. A name belongs first to the folder with this name."""
    adapters = list[AdapterFolder]()
    for source in sorted(dict.fromkeys(sources), key=lambda source: legal_name(source.name) != source.name):
        adapter = AdapterFolder(legal_name(source.name), source)
        if objection := _objection(adapter, used_names):
            notes.append(f"{source.folder} is not served: {objection}; --adapter NAME=FOLDER names it")
            continue
        used_names.add(_own_name(source, notes))
        adapters.append(adapter)
    return adapters


def _objection(adapter: AdapterFolder, used_names: set[str]) -> str:
    if not adapter.name:
        return "nothing of its name can be in a model's"
    if adapter.name in used_names:
        return f"another model is called {adapter.name}"
    return _wrong(_adapter_object(adapter, "any", {"name": "any", "namespace": NAMESPACE}, "any"))


def manifests(
    served: ServedModels,
    memory: Callable[[], MemoryLimit] = available_memory,
    gpu_memory: Callable[[], list[int]] = gpu_bytes,
    *,
    gpu: bool = False,
) -> list[Object]:
    """Make the pool, then its adapters; what their folders here say of sizes is in them.

    `gpu`: one computes, of whose memory the runner takes what KV pages may have; `gpu_memory` is of each. Raises
    BadInput.
    """
    adapters = served.adapters
    names = [served.name, *(adapter.name for adapter in adapters)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"several models would be called {', '.join(twice)}", "name them with --adapter NAME=SOURCE")
    labels = _labels(names, [adapter.written["metadata"]["name"] for adapter in adapters if adapter.written])
    pool, spec = served.written or _object("ServingPool", labels[0], {}), _model_spec(served.model)
    pool_spec, rank = pool["spec"], max([MIN_RANK, *(_largest_rank(adapter.source) for adapter in adapters)])
    model = _with_source({**pool_spec.get("model", {}), "name": served.name}, served.model)
    new_spec = {**pool_spec, "model": model, "lora": {"maxRank": rank, **pool_spec.get("lora", {})}}
    memory_of, advanced = pool_spec.get("memory") or {}, pool_spec.get("advanced") or {}
    if served.offload is not None:
        offload = _offload(str(served.offload), memory().n_bytes, gpu_memory() if gpu else None)
        new_spec["memory"] = {**memory_of, "offload": offload}
    elif not memory_of and "kvPages" not in advanced:
        if gpu:
            new_spec["memory"] = {"fraction": GPU_SHARE}
        elif spec is not None:
            new_spec["advanced"] = {**advanced, "kvPages": _pages(spec, served, memory())}
    objects = [{**pool, "spec": new_spec}]
    for label, adapter in zip(labels[1:], adapters, strict=True):
        objects.append(_adapter_object(adapter, label, pool["metadata"], served.name))
    for part in (objects[:1], objects[1:]):  # what is wrong with the base's name is so with each adapter's base
        if wrong := [fault for obj in part if (fault := _wrong(obj))]:
            raise BadInput("\n".join(wrong))
    return objects


def _computes_on_gpu(executor: str | None) -> bool:
    """Return whether the runner computes on a GPU: by a named executor, or by the first possible one."""
    return executor == "cuda" or (executor in (None, "auto") and finds_gpu())


def print_manifests(objects: Sequence[Object]) -> None:
    """Print manifests as `weft up -f` reads them."""
    if any(_files_of(obj)["uri"].startswith("file:") for obj in objects):
        say("# file: URIs are below /: weft serve -f THIS, or weft up --file-root / -f THIS")
    say("---\n".join(dump(obj, "yaml").rstrip("\n") + "\n" for obj in objects).rstrip("\n"))


def downloaded(served: ServedModels) -> ServedModels:
    """Bring repositories into the user's Hugging Face cache, by that library. Raises BadInput."""
    adapters = [replace(adapter, source=_download(adapter.source)) for adapter in served.adapters]
    return replace(served, model=_download(served.model), adapters=adapters)


def _download(source: ServeSource) -> ServeSource:
    if source.repository is None:
        return source
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    note(f"weft: downloading {source.uri} into the Hugging Face cache")
    try:
        at = snapshot_download(source.repository, revision=source.revision, allow_patterns=list(REPOSITORY_FILES))
    except RepositoryNotFoundError as error:
        message = "it does not exist, or is private"
        raise BadInput(f"{source.uri}: {message}", "a private one needs `hf auth login` or HF_TOKEN") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BadInput(f"{source.uri}: {str(error).splitlines()[0]}") from error
    return replace(source, uri=f"file:{at.lstrip('/')}", revision=None, folder=Path(at), repository=None)


def _offload(folder: str, host_bytes: int, gpus: list[int] | None) -> dict[str, Any]:
    """Make the spec's `memory.offload`: three quarters of this machine's memory, or what a runner takes of a GPU and
    half of the memory beside it. Raises BadInput."""
    left = host_bytes - PROCESS_BYTES
    if gpus is None:
        return {"deviceBytes": _mebibytes(left * 3 // 4), "diskPath": folder}
    if not min(gpus, default=0):
        message = "the driver of GPUs does not say here how much memory they have"
        raise BadInput(
            f"--offload: {message}", "weft up -f MANIFEST with memory.offload.deviceBytes, or --executor cpu"
        )
    device = _mebibytes(int(min(gpus) * GPU_SHARE))
    return {"deviceBytes": device, "hostBytes": _mebibytes(left // 2), "diskPath": folder}


def _mebibytes(n_bytes: int) -> str:
    return f"{max(0, n_bytes) >> 20}Mi"


def _pages(spec: ModelSpec, served: ServedModels, memory: MemoryLimit) -> int:
    """Choose the number of KV pages: half of what weights leave of the memory, and no more than is of use.

    Of use are pages for as many sequences as a batch has, each as long as the model's context. Raises BadInput if
    weights and a single context do not fit.
    """
    page, context = page_bytes(spec, "bf16", PAGE_TOKENS), -(-spec.max_positions // PAGE_TOKENS)
    weights = estimate_memory(spec, "bf16", kv_pages=0, page_tokens=PAGE_TOKENS).total
    left = memory.n_bytes - weights - PROCESS_BYTES
    pages = min(left // 2 // page, SEQUENCES * context, MAX_KV_PAGES)
    if pages < 1:
        raise BadInput(
            f"the weights of {served.name} take {weights / 2**30:.1f} GiB, each KV page of {PAGE_TOKENS} tokens "
            f"{page / 2**20:.2f} MiB, and {memory.limit} has {memory.n_bytes / 2**30:.1f} GiB",
            "--offload FOLDER on a fast disk, from which weights are read in each step",
        )
    return pages


def _model_spec(source: ServeSource) -> ModelSpec | None:
    """Read the shape of a model that is on this machine; None: it is not. Raises BadInput."""
    if source.folder is None:
        return None
    path = source.folder / MODEL_CONFIG
    if not path.is_file():
        if (source.folder / ADAPTER_CONFIG).is_file():
            raise BadInput(f"{source.folder} is an adapter, not a base model", "weft serve BASE --adapter NAME=FOLDER")
        raise BadInput(f"{source.folder} has no {MODEL_CONFIG}", "a model's folder is as transformers writes it")
    try:
        return parse_model_config(path.read_bytes())
    except (OSError, Refused) as error:
        raise BadInput(f"{path}: {error}") from error


def _largest_rank(source: ServeSource) -> int:
    """The largest rank of an adapter's modules; 0 if nothing here says it. The depot tells what is wrong with it."""
    if source.folder is None:
        return 0
    try:
        return parse_adapter_config((source.folder / ADAPTER_CONFIG).read_bytes()).largest_rank
    except (OSError, Refused):
        return 0


def _adapter_object(adapter: AdapterFolder, label: str, pool: Object, base: str) -> Object:
    """Make an adapter's object. `pool`: the pool's metadata."""
    if written := adapter.written:
        spec = {**written["spec"], "source": _with_source(_files_of(written), adapter.source)}
        return {**written, "spec": spec}
    references = {"poolRef": {"name": pool["name"]}, "baseModel": base, "modelName": adapter.name}
    return _object("LoRAAdapter", label, {**references, "source": _artifact(adapter.source)}, pool["namespace"])


def _wrong(obj: Object) -> str:
    """Explain why no stack would take the manifest; "": it would."""
    try:
        parse_object(obj)
    except ManifestError as error:
        return "; ".join(f"{problem.field}: {problem.message}" for problem in error.problems)
    return ""


def _artifact(source: ServeSource) -> dict[str, str]:
    return {"uri": source.uri, **({"revision": source.revision} if source.revision else {})}


def _with_source(artifact: dict[str, Any], source: ServeSource) -> dict[str, Any]:
    return {**{name: value for name, value in artifact.items() if name not in ("uri", "revision")}, **_artifact(source)}


def _files_of(obj: Object) -> dict[str, Any]:
    spec = obj["spec"]
    return spec["model"] if obj["kind"] == "ServingPool" else spec["source"]


def _object(kind: str, name: str, spec: dict[str, Any], namespace: str = NAMESPACE) -> Object:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def _labels(names: Iterable[str], used_names: Iterable[str] = ()) -> list[str]:
    """Make an object name for each, all different: what a label may not have becomes `-`."""
    labels = list(used_names)
    n_labels = len(labels)
    for name in names:
        label = (
            re.sub(r"[^a-z0-9]+", "-", name.rpartition("/")[2].lower()).strip("-")[: LABEL - 5].strip("-") or "model"
        )
        number, free = 1, label
        while free in labels:
            number += 1
            free = f"{label}-{number}"
        labels.append(free)
    return labels[n_labels:]
