"""What can go wrong with the CPU kernels, split by what the caller can do.

NativeError
├── NativeUnavailable   there is no library on this machine: serve without it, and log `reason`
│   └── NoCompiler      none is installed: fetch one, or say which to install
├── LevelUnusable       an instruction level was asked for that this CPU or this library lacks: use one of `usable`
└── CallRefused         a kernel refused its arguments: a mistake of the calling code
"""


class NativeError(Exception):
    """Root of the errors of the CPU kernels."""


class NativeUnavailable(NativeError):
    """No library can be had here. `reason` is one short text for people, a compiler's message included."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoCompiler(NativeUnavailable):
    """No C++ compiler is installed, and $CXX names none."""


class LevelUnusable(NativeError):
    """`asked` is no level, or none that can be used here; `usable` are those that can, best first."""

    def __init__(self, asked: str, why: str, usable: tuple[str, ...]) -> None:
        super().__init__(f"instruction level {asked!r}: {why}; usable here: {', '.join(usable)}")
        self.asked, self.usable = asked, usable


class CallRefused(NativeError):
    """A native function returned a negative code."""

    def __init__(self, function: str, code: int, meaning: str) -> None:
        super().__init__(f"{function}: {meaning} ({code})")
        self.function, self.code = function, code
