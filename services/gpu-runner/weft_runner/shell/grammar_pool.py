"""Grammars that are compiled beside the steps, for the engine's queue."""

import logging
from collections.abc import Callable
from functools import partial

from weft_runner.core.events import CompileGrammar, GrammarCompiled
from weft_runner.model.grammar import GrammarRefused, Grammars

log = logging.getLogger(__name__)


class GrammarPool:
    """`report` is called from other threads, once for each order. What waits is bounded by `core.awaited_grammars`."""

    def __init__(self, grammars: Grammars, report: Callable[[GrammarCompiled], None]) -> None:
        self._grammars, self._report = grammars, report

    def execute(self, order: CompileGrammar) -> None:
        """Have it compiled; it is expected to be quick where it has been compiled before."""
        long = bool(order.emitted) or not self._grammars.knows(order.grammar)
        self._grammars.threads.put(partial(self._compile, order), long=long)

    def close(self) -> None:
        """What has begun is not waited for."""
        self._grammars.threads.close()

    def _compile(self, order: CompileGrammar) -> None:
        state, fault = None, ""
        try:
            state = self._grammars.begin(order.grammar, order.emitted, order.ends)
        except GrammarRefused as error:
            fault = str(error)
        except BaseException as error:  # our own mistake, or a panic, must not leave the request waiting
            log.exception("a grammar was not compiled")
            fault = f"{type(error).__name__}: {error}"
        self._report(GrammarCompiled(order.peer, order.request_id, order.epoch, state, fault))
