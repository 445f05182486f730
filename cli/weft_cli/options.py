"""Options that several commands share, and what they mean."""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from weft.hosts import host_name
from weft.process import data_root, serve_root
from weft_cli.errors import BadInput, CommandError

if TYPE_CHECKING:
    from weft_cli.stack import StackClient

T = TypeVar("T")
PLUGINS = ("kubectl-weft", "kubectl_complete-weft")
WHERE = "Where the stack is"

KINDS = {
    "loraadapters": "loraadapters",
    "loraadapter": "loraadapters",
    "lora": "loraadapters",
    "servingpools": "servingpools",
    "servingpool": "servingpools",
    "spool": "servingpools",
    "apikeys": "apikeys",
    "apikey": "apikeys",
    "wkey": "apikeys",
    "runners": "runners",
    "runner": "runners",
}
DATA_DIR_HELP = (
    "Where the stack keeps everything. Default: $WEFT_DATA_DIR, else $XDG_STATE_HOME/weft, else ~/.local/state/weft."
)

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help=DATA_DIR_HELP, show_default=False, rich_help_panel=WHERE)
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context", help="A cluster, by its context of the kubeconfig; needs kubectl.", rich_help_panel=WHERE
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", help="A kubeconfig, instead of kubectl's own; its current context.", rich_help_panel=WHERE
    ),
]
SystemNamespace = Annotated[
    str,
    typer.Option(
        "--system-namespace",
        envvar="WEFT_SYSTEM_NAMESPACE",
        help="The namespace of Weft's Helm release in a cluster.",
        rich_help_panel=WHERE,
    ),
]
SupervisorAt = Annotated[
    str | None,
    typer.Option("--supervisor", help="HOST:PORT of a supervisor that is not the stack's.", rich_help_panel=WHERE),
]
TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        help="tls.crt, tls.key and ca.crt of an admin, for a supervisor under mutual TLS. Default in a cluster: the "
        "release's Secret.",
        rich_help_panel=WHERE,
    ),
]
GatewayUrl = Annotated[
    str | None,
    typer.Option("--url", help="A gateway, as http://HOST:PORT. Default: the stack's.", rich_help_panel=WHERE),
]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="WEFT_API_KEY", help="An API key, where the gateway asks for one.", show_envvar=True),
]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="The namespace to look in.", show_default="default, or the context's"),
]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--filename", "-f", help="A manifest, a folder of manifests, or - for standard input; may be given again."
    ),
]


AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-hosts",
        help="Without --auth: a name of the API beside localhost and addresses, NAME or *.DOMAIN; may be given again.",
    ),
]


PrefixSharing = Annotated[
    bool,
    typer.Option(
        "--prefix-sharing/--no-prefix-sharing",
        help="Without --auth: reuse prompts among all callers, who can tell by the time that it saves.",
    ),
]


CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        help="An origin whose pages may call the API, as https://app.example.com, or * with --auth; repeatable.",
    ),
]
_ORIGIN = re.compile(r"\*|https?://[^/ ]+")


class LogLevel(StrEnum):
    """Values of `--log-level`, accepted by every component."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def checked_data_dir(data_dir: Path | None) -> Path:
    """The data directory of the flag, else the usual one. Raises BadInput if something else is in its place."""
    folder = (data_dir or data_root()).absolute()
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"the data directory {folder} is not a folder", "name another with --data-dir")
    return folder


def checked_hosts(names: list[str] | None) -> tuple[str, ...]:
    """Return the names of --allowed-hosts. Raises BadInput."""
    try:
        return tuple(host_name(name) for text in names or () for name in text.split(","))
    except ValueError as error:
        raise BadInput(f"--allowed-hosts: {error}") from error


def checked_origins(origins: list[str] | None, *, auth: bool) -> tuple[str, ...]:
    """Return the origins of --cors-origin. Raises BadInput; without keys also for *: any page could call the API."""
    for origin in origins or ():
        if not _ORIGIN.fullmatch(origin):
            raise BadInput(f"--cors-origin: expected SCHEME://HOST[:PORT] or *, got {origin!r}")
        if origin == "*" and not auth:
            raise BadInput(
                "--cors-origin: * lets every page that somebody opens call an API without keys",
                "name the origins, as --cors-origin http://localhost:3000, or ask for keys with --auth",
            )
    return tuple(origins or ())


def running_data_dir(data_dir: Path | None) -> Path:
    """Return the data directory for commands of a stack: the flag's, or else the running one, `weft up` before `weft
    serve`.
    """
    description = "stack.json"
    if data_dir is None and not (data_root() / description).exists() and (serve_root() / description).exists():
        return serve_root().absolute()
    return checked_data_dir(data_dir)


def on_stack(command: Callable[..., T]) -> Callable[..., T]:
    """Give a command the parameter `stack`, and the options for the place of the stack."""
    signature = inspect.signature(command)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "stack"]
    location = list(inspect.signature(located).parameters.values())

    @functools.wraps(command)
    def run(**options: Any) -> T:
        with located(**{parameter.name: options.pop(parameter.name) for parameter in location}) as stack:
            return command(stack=stack, **options)

    run.__signature__ = signature.replace(parameters=[*parameters, *location])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*parameters, *location)}
    return run


def located(
    data_dir: DataDir = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = "weft-system",
) -> "StackClient":
    """Find the stack in this cluster, or without a cluster the stack of the data directory."""
    if context is None and kubeconfig is None and not is_plugin():
        from weft_cli.stack import LocalStack

        return LocalStack(running_data_dir(data_dir))
    if data_dir is not None:
        raise BadInput("--data-dir is of a stack on this machine", "leave it out, or leave out the cluster's flags")
    from weft_cli.cluster import Access, ClusterStack

    return ClusterStack(Access(context, kubeconfig, system_namespace))


def names_of(context: typer.Context, incomplete: str) -> list[str]:
    """Complete names of objects of the kind typed before. Without an answering stack there are none."""
    params = context.params
    location = {name: params[name] for name in inspect.signature(located).parameters if params.get(name) is not None}
    try:
        with located(**location) as stack:
            everywhere = params.get("all_namespaces", False)
            namespace = None if everywhere else stack.namespace(params.get("namespace"))
            kind = plural(params["kind"])
            items = [] if kind == "runners" else stack.api.list(kind, namespace)[0]
    except CommandError:
        return []
    names = (item["metadata"]["name"] for item in items)
    return [name for name in names if name.startswith(incomplete)]


def kinds(incomplete: str) -> list[str]:
    """Complete kinds of resources."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def gateway_of(stack: "StackClient", url: str | None) -> str:
    """The gateway there, else the stack's; without a `/v1` at its end."""
    return (url or stack.gateway_url()).rstrip("/").removesuffix("/v1").rstrip("/")


def is_plugin() -> bool:
    """Whether kubectl runs this command: `kubectl weft` is about the current context's cluster."""
    return Path(sys.argv[0]).name in PLUGINS


def plural(kind: str) -> str:
    """Find the plural of a kind: `lora`, `LoRAAdapter`, `loraadapters` -> `loraadapters`. Raises BadInput."""
    resource = KINDS.get(kind.lower())
    if resource is None:
        raise BadInput(
            f"there is no resource {kind!r}",
            "there are: loraadapters (lora), servingpools (spool), apikeys (wkey), runners",
        )
    return resource
