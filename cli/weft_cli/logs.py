"""The commands `weft logs` and `weft status`: what the components say, and how they are."""

import codecs
from pathlib import Path

from weft_cli.client import ControllerClient
from weft_cli.errors import CommandError, NotRunning
from weft_cli.output import note, say, table


def logs(controller: ControllerClient, component: str | None, tail: int | None, *, follow: bool) -> None:
    """Print the last lines of a component's log (None: all that is kept); the components when none is named.

    A stack that ended can still be read.
    """
    try:
        if component is None:
            say("\n".join(["controller", *sorted(controller.stack()["components"])]))
            return
        text = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two pieces
        for data in controller.logs(component, tail, follow=follow):
            say(text.decode(data), end="")
    except NotRunning as error:
        _read(controller.data_dir / "logs", component, tail, error)


def status(controller: ControllerClient) -> None:
    """Print every component, and the address of the API."""
    stack = controller.stack()
    rows = [
        (
            name,
            component["phase"],
            str(component["pid"] or "-"),
            str(component["restarts"]),
            component["listen"] or "-",
            component["detail"],
        )
        for name, component in stack["components"].items()
    ]
    say(f"API        {stack['gateway']}/v1 ({'with' if stack['auth'] else 'without'} API keys)")
    say(f"Data       {stack['dataDir']}")
    say(f"Controller pid {stack['pid']}, registry {'connected' if stack['registryUp'] else 'not connected'}")
    say("")
    say("\n".join(table(("COMPONENT", "STATE", "PID", "RESTARTS", "LISTENS", "NOTE"), rows)))
    if any(component["phase"] != "Ready" for component in stack["components"].values()):
        raise CommandError("not every component is ready")


def _read(folder: Path, component: str | None, tail: int | None, error: NotRunning) -> None:
    from weft_operator.local.logs import last_lines

    names = sorted(path.stem for path in folder.glob("*.log")) if folder.is_dir() else []
    if component is None and names:
        say("\n".join(names))
    elif component in names:
        note(f"weft is not running; the last lines of {folder / component}.log:")
        say("".join(f"{line}\n" for line in last_lines(folder / f"{component}.log", tail)), end="")
    else:
        raise error
