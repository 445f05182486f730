"""Batch lines beside interactive requests: the interactive ones' token time, and the lines' tokens a second.

Two interactive rows decode; lines wait in the runner as many as it takes. Once they have batch priority, and the runner
decides which of them join an iteration; in the sweep they have the priority of the others, and a fixed cap of them run
at a time, whatever a step takes. The pool's token time is twice a step of one row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from statistics import median

from weft.domain.request import Priority
from weft_bench.cpu_context import Context
from weft_bench.cpu_decode import base
from weft_bench.cpu_engine import Ask, Sizes, Subject
from weft_bench.row_caps import INTERACTIVE, LINE_TOKENS, PROMPT_TOKENS, TOKEN_TIMES, RuleRun, caps, figures
from weft_stage.lines import Line
from weft_stage.playing import Beside

ANSWERS = 4  # times as many tokens as other cases decode


def priority_case(context: Context) -> Iterator[Line]:
    """Run rounds of every cap and of priorities, so that all see the same machine."""
    amounts = context.options.amounts
    rows, tokens = 2 * amounts.rows, ANSWERS * amounts.tokens
    sizes = Sizes(rows=rows, slots=1, context_tokens=PROMPT_TOKENS + tokens, profile=True)
    found: dict[int | None, list[Beside]] = {cap: [] for cap in (*caps(rows), None)}
    label, rounds = f"{context.model.name}: priority", amounts.repetitions + 1
    with context.subject(sizes) as subject, context.bar(label, rounds * len(found)) as advanced:
        token_time_ms = _token_time_ms(context, subject)
        scheduler = subject.engine.runner.pool.scheduler
        scheduler.limit(replace(subject.built.limits.batch, token_time_ms=token_time_ms))
        for number in range(rounds):
            for cap, runs in found.items():
                asks = context.model.asks(subject, base(INTERACTIVE), PROMPT_TOKENS, tokens)
                lines = _lines(context, subject, Priority.BATCH if cap is None else Priority.INTERACTIVE, rows)
                most = rows - INTERACTIVE if cap is None else cap
                run = subject.play_beside(asks, cycle(lines), most)
                if number:  # the first round is for the step times to be learnt
                    runs.append(run)
                advanced(1)
        measured = {
            cap: RuleRun(_gaps_s(runs), median([run.line_tokens / run.wall_s for run in runs]))
            for cap, runs in found.items()
        }
        yield from figures(context.on(subject).line, "", measured, token_time_ms)


def _token_time_ms(context: Context, subject: Subject) -> float:
    """Return twice the median step of one row."""
    played = subject.play(context.model.asks(subject, base(1), PROMPT_TOKENS, context.options.amounts.tokens))
    ends = [beat.ended for beat in played.beats if not beat.prefills]
    return TOKEN_TIMES * 1e3 * median(after - before for before, after in pairwise(ends))


def _lines(context: Context, subject: Subject, priority: Priority, rows: int) -> Sequence[Ask]:
    asks = context.model.asks(subject, base(4 * rows), PROMPT_TOKENS, LINE_TOKENS)
    return [replace(ask, priority=priority) for ask in asks]


def _gaps_s(runs: Sequence[Beside]) -> list[float]:
    """Return the times between two tokens of interactive rows, in all runs."""
    return [after - before for run in runs for life in run.lives for before, after in pairwise(life.at)]
