"""Triton's interpreter without work that it does for nothing: most of what it spends on kernels as small as the tests'.

It computes whether integers overflow and then looks at no answer, and it puts its functions in place of the language's
at every call of a function, though a launch has done so before. A launch does the same here, once for each function.
Nor does it warn of what a device would compute without a word, of padding.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton.runtime import interpreter


@cache
def hurry() -> None:
    """For this process, from now on."""
    assert not interpreter.interpreter_builder.options.debug, "else overflows are looked at"
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    patched: set[Callable[..., Any]] = set()  # in this launch
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        with np.errstate(all="ignore"):
            return launch(self, *args, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called
