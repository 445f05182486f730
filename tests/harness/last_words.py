"""What the components of a stack said last: its folder is gone by the next run."""

from contextlib import suppress
from pathlib import Path

from weft_stage.stack import Stack

LAST_LINES, LAST_CHARACTERS = 12, 2000


def last_words(stack: Stack) -> str:
    """Return the end of what `weft up` printed, and of each component its state and the end of its log."""
    said = [f"weft up: {stack.log()[-LAST_CHARACTERS:]}"]
    for name, component in stack.components().items():
        state = ", ".join(f"{key} {component[key]}" for key in ("phase", "pid", "restarts", "detail"))
        with suppress(OSError):
            lines = Path(component["log"]).read_text(errors="replace").splitlines()
            said.append("\n".join((f"{name}: {state}", *lines[-LAST_LINES:])))
    return "\n\n".join(said)
