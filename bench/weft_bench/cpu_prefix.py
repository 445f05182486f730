"""The first token of a request whose prompt was asked before: computed, read on the device, read from host memory.

One request at a time. Each round has a prompt of its own: it is computed, read again where its pages are, evicted by
requests that need all pages, and read again from host memory. That each way was the one that was meant is asserted.
"""

from collections.abc import Iterator
from statistics import median

from weft_bench.cpu_context import Context
from weft_bench.cpu_engine import PAGE_TOKENS, Ask, Sizes, Subject
from weft_bench.cpu_shapes import prompts
from weft_stage.lines import Line

TOKENS, TAIL_TOKENS = 1024, 16  # that requests have in common, and of their own
ROWS, ANSWER_TOKENS = 2, 16
COMPUTED, DEVICE, HOST = "computed", "read on the device", "read from host memory"


def prefix_case(context: Context) -> Iterator[Line]:
    """Time to the first token of the same prompt, three ways."""
    repetitions = context.options.amounts.repetitions
    sizes = Sizes(rows=ROWS, slots=1, context_tokens=TOKENS + 2 * TAIL_TOKENS)
    found: dict[str, list[float]] = {COMPUTED: [], DEVICE: [], HOST: []}
    with (
        context.subject(sizes, adapter_bytes=0.0) as subject,
        context.bar(f"{context.model.name}: prefix", repetitions + 1) as advanced,
    ):
        for number in range(repetitions + 1):
            for way, seconds in _round(context, subject, f"round {number}"):
                if number:
                    found[way].append(seconds)
            advanced(1)
        reporter = context.on(subject)
        case, best = f"a prompt of {TOKENS} tokens and {TAIL_TOKENS}", median(found[COMPUTED])
        for way, seconds in found.items():
            yield reporter.line(case, f"first token, prefix {way}", median(seconds) * 1e3, "ms", baseline=best * 1e3)
        yield reporter.line(
            case, "first token, from host memory / computed", median(found[HOST]) / best, "x", target="<= 0.25"
        )


def _round(context: Context, subject: Subject, salt: str) -> Iterator[tuple[str, float]]:
    rng, vocab, reuse = context.model.rng, context.model.shape.vocab, subject.engine.runner.pool.reuse
    (prefix,) = prompts(rng, 1, TOKENS, vocab)
    for way, read, from_host in ((COMPUTED, 0, 0), (DEVICE, TOKENS, 0), (HOST, TOKENS, TOKENS)):
        if way is HOST:
            _evict(context, subject)
        (tail,) = prompts(rng, 1, TAIL_TOKENS, vocab)
        before = reuse.tokens, reuse.host_tokens
        (life,) = subject.play([Ask("", [*prefix, *tail], 2, salt)]).lives
        assert (reuse.tokens - before[0], reuse.host_tokens - before[1]) == (read, from_host), way
        yield way, life.ttft_s


def _evict(context: Context, subject: Subject) -> None:
    """Requests that leave too few pages free, so that the prefix is copied out; then some that take all."""
    tokens = subject.built.limits.total_pages // ROWS * PAGE_TOKENS
    for rows in (1, ROWS):
        made = prompts(context.model.rng, rows, tokens - ANSWER_TOKENS, context.model.shape.vocab)
        subject.play([Ask("", prompt, ANSWER_TOKENS) for prompt in made])
