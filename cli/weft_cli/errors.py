"""What a user is told instead of a traceback.

CommandError            exit 1: it was understood and failed
├── BadInput            exit 2: the command line or a manifest is wrong
├── NotThere            exit 1: there is no object or component of that name
├── Changed             exit 1: the object is not what it was when it was read, or is being deleted
└── NotRunning          exit 1: there is no stack to talk to
"""


class CommandError(Exception):
    """The failure of a command: the fault, its place and cause, and the remedy. `hint` is the remedy, on a separate
    line.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class BadInput(CommandError):
    exit_code = 2


class NotThere(CommandError):
    """The controller has no object with this name."""


class Changed(CommandError):
    """The object has changed since it was read, or is being deleted."""


class NotRunning(CommandError):
    """No controller answers in this data directory."""
