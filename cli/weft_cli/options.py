"""Options that several commands share, and what they mean."""

import os
from pathlib import Path
from typing import Annotated

import typer

from weft_cli.errors import BadInput

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
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="The namespace to look in.")]
Files = Annotated[
    list[Path] | None,
    typer.Option("--filename", "-f", help="A manifest or a folder of manifests; may be given again."),
]


def data_dir(given: Path | None) -> Path:
    """The data directory: the flag, `$WEFT_DATA_DIR`, `$XDG_STATE_HOME/weft`, `~/.local/state/weft`."""
    if given is not None:
        return given.absolute()
    if folder := os.environ.get("WEFT_DATA_DIR"):
        return Path(folder).absolute()
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "weft"


def plural(kind: str) -> str:
    """`lora`, `LoRAAdapter`, `loraadapters` -> `loraadapters`. Raises BadInput."""
    found = KINDS.get(kind.lower())
    if found is None:
        raise BadInput(
            f"there is no resource {kind!r}", "there are: loraadapters (lora), servingpools (spool), runners"
        )
    return found
