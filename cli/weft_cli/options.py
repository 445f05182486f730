"""Options that several commands share, and what they mean."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.process import data_root, serve_root
from weft_cli.errors import BadInput

if TYPE_CHECKING:
    from weft_cli.client import Controller
    from weft_cli.runners import Supervisor

KINDS = {
    "loraadapters": "loraadapters",
    "loraadapter": "loraadapters",
    "lora": "loraadapters",
    "servingpools": "servingpools",
    "servingpool": "servingpools",
    "spool": "servingpools",
    "runners": "runners",
    "runner": "runners",
}
DATA_DIR_HELP = "Where the stack keeps everything. Default: $WEFT_DATA_DIR, else ~/.local/state/weft."

DataDir = Annotated[Path | None, typer.Option("--data-dir", help=DATA_DIR_HELP, show_default=False)]
SupervisorAt = Annotated[
    str | None,
    typer.Option("--supervisor", help="HOST:PORT of a supervisor in a cluster. Default: this machine's stack."),
]
TlsDir = Annotated[
    Path | None,
    typer.Option("--tls-dir", help="tls.crt, tls.key and ca.crt of an admin, for a supervisor under mutual TLS."),
]
GatewayUrl = Annotated[
    str | None, typer.Option("--url", help="A gateway, as http://HOST:PORT. Default: this machine's stack.")
]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="WEFT_API_KEY", help="An API key, where the gateway asks for one.", show_envvar=True),
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="The namespace to look in.")]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--filename", "-f", help="A manifest, a folder of manifests, or - for standard input; may be given again."
    ),
]


class LogLevel(StrEnum):
    """What every component takes as `--log-level`."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def data_dir(given: Path | None) -> Path:
    """The data directory: the flag, else the usual one. Raises BadInput where something else is in its place."""
    folder = (given or data_root()).absolute()
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"the data directory {folder} is not a folder", "name another with --data-dir")
    return folder


def running_data_dir(given: Path | None) -> Path:
    """The same for commands that ask a stack: without a flag the one that runs, `weft up` before `weft serve`."""
    description = "stack.json"
    if given is None and not (data_root() / description).exists() and (serve_root() / description).exists():
        return serve_root().absolute()
    return data_dir(given)


def controller(given: Path | None) -> "Controller":
    """The controller of that data directory; nothing is asked yet."""
    from weft_cli.client import Controller

    return Controller(running_data_dir(given))


def supervisor(given: Path | None, address: str | None, tls_dir: Path | None) -> "Supervisor":
    """The supervisor at that address, else the one of that data directory's stack."""
    from weft_cli.runners import Supervisor

    return Supervisor(address or controller(given).stack()["supervisor"], tls_dir)


def gateway_url(given: Path | None, url: str | None) -> str:
    """The gateway there, else the one of that data directory's stack; without a `/v1` at its end."""
    found = url or str(controller(given).stack()["gateway"])
    return found.rstrip("/").removesuffix("/v1").rstrip("/")


def plural(kind: str) -> str:
    """`lora`, `LoRAAdapter`, `loraadapters` -> `loraadapters`. Raises BadInput."""
    found = KINDS.get(kind.lower())
    if found is None:
        raise BadInput(
            f"there is no resource {kind!r}", "there are: loraadapters (lora), servingpools (spool), runners"
        )
    return found
