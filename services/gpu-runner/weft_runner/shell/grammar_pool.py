"""Threads that compile grammars beside the steps and tell the engine's queue."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from weft_runner.core.events import CompileGrammar, GrammarCompiled
from weft_runner.model.grammar import GrammarRefused, Grammars

log = logging.getLogger(__name__)
THREADS = 2  # what is queued for them is bounded by the machine (`core.awaited_grammars`)


class GrammarPool:
    """`report` is called from its threads, once for each order."""

    def __init__(self, grammars: Grammars, report: Callable[[GrammarCompiled], None]) -> None:
        self._grammars, self._report = grammars, report
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")

    def execute(self, order: CompileGrammar) -> None:
        self._threads.submit(self._compile, order)

    def close(self) -> None:
        """What has begun is not waited for: a hostile grammar may take long."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, order: CompileGrammar) -> None:
        state, fault = None, ""
        try:
            state = self._grammars.begin(order.grammar, order.emitted, order.ends)
        except GrammarRefused as error:
            fault = str(error)
        except Exception as error:  # our own mistake must not leave the request waiting
            log.exception("a grammar was not compiled")
            fault = f"{type(error).__name__}: {error}"
        self._report(GrammarCompiled(order.peer, order.request_id, order.epoch, state, fault))
