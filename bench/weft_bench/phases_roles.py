"""# Roles that change under load

`weft bench phases --part roles`: three runners of one thread each (m135), one for prompts and two for tokens, of which
one may do both under load (in the rows of a record there were two, neither bound to its role). In each round chats are
decoded while more prompts come than the prompt runner takes, so that a token runner gets the order to compute prompts
beside its rows; after five seconds without a queue it is a token runner again. Every token and its log probability are
compared with the same request's in a Unified pool of one runner.

The rows of changes and of iterations are a record: a runner counted them then, from the order to the first iteration
that computes a prompt, those included that ran before the prompt was there.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence

from weft.domain.runner import RunnerRole
from weft_bench.cpu_context import Bar
from weft_bench.phases import CHAT_ANSWER, CHAT_PROMPT, live_model
from weft_stage.lines import Line, Origin
from weft_stage.reports import runners
from weft_stage.stack import PATIENCE_S, Stack
from weft_trouble.fault_streams import Ask, Difference, Stream, Streams, Token, difference, recorded

ROUNDS, QUICK_ROUNDS = 10, 2
CHATS = 6
BURST, BURST_PROMPT, BURST_ANSWER = 8, 512, 2  # requests; tokens
FIRST_WORD, LAST_WORD = 100, 49_000  # of the vocabulary of numbered words
POLL_S = 0.1
POOL = {
    "replicas": 3,
    "phases": {"mode": "Split"},
    "runnerGroups": [
        {"name": "prompt", "phase": "Prompt", "minRunners": 1, "maxRunners": 1},
        {"name": "token", "phase": "Token", "minRunners": 2, "maxRunners": 2},
    ],
}
APART = {RunnerRole.PROMPT, RunnerRole.TOKEN}


def figures(origin: Origin, *, quick: bool, seed: int, bar: Bar) -> Iterator[Line]:
    """Raises BenchFailed."""
    model, chance, rounds = live_model(1024), random.Random(seed), QUICK_ROUNDS if quick else ROUNDS
    asks = [_asks(chance, model.names) for _ in range(rounds)]
    with model.stack({"replicas": 1}, "weft_stage.thread_runner") as stack, bar("undisturbed answers", 1) as advanced:
        expected = asyncio.run(recorded(stack.url, [ask for chats, burst in asks for ask in (*chats, *burst)]))
        advanced(1)
    with model.stack(POOL, "weft_stage.thread_runner") as stack:
        streams = list[Stream]()
        asyncio.run(
            recorded(stack.url, [_ask(chance, name, CHAT_PROMPT, 2) for name in model.names])
        )  # adapters in slots
        with bar("roles that change", rounds) as advanced:
            for number, (chats, burst) in enumerate(asks):
                streams += asyncio.run(_round(stack, number, chats, burst))
                advanced(1)
        ordered = stack.metric("scheduler", "weft_scheduler_role_changes_total", role=RunnerRole.MIXED.value)
    yield from lines(origin, f"roles, {rounds} bursts", streams, expected, ordered)


def _asks(chance: random.Random, models: Sequence[str]) -> tuple[list[Ask], list[Ask]]:
    """Chats, and the prompts that come while these are decoded."""

    chats = [_ask(chance, chance.choice(models), CHAT_PROMPT, CHAT_ANSWER) for _ in range(CHATS)]
    return chats, [_ask(chance, chance.choice(models), BURST_PROMPT, BURST_ANSWER) for _ in range(BURST)]


def _ask(chance: random.Random, model: str, prompt_tokens: int, max_tokens: int) -> Ask:
    prompt = " ".join(f"w{chance.randint(FIRST_WORD, LAST_WORD)}" for _ in range(prompt_tokens))
    return Ask(model, prompt, max_tokens, 0.0, chance.randrange(1 << 30))


async def _round(stack: Stack, number: int, chats: Sequence[Ask], burst: Sequence[Ask]) -> Sequence[Stream]:
    async with asyncio.timeout(PATIENCE_S):
        roles = set[RunnerRole]()
        while roles != APART:
            await asyncio.sleep(POLL_S)
            roles = {one.figures.role for one in await runners(stack.address("supervisor"))}
    async with Streams(stack.url, f"round-{number}") as streams:
        decoding = streams.start(chats)
        await streams.until(lambda: all(stream.tokens or stream.ended for stream in decoding))
        streams.start(burst)
    return streams.all


def lines(
    origin: Origin, case: str, streams: Sequence[Stream], expected: dict[Ask, list[Token]], ordered: float
) -> Iterator[Line]:
    wrong = sum(
        (difference(expected[one.ask], one.tokens, failed=bool(one.error)) for one in streams), start=Difference()
    )
    yield origin.line(case, "requests", len(streams), "")
    yield origin.line(case, "requests that failed", sum(bool(one.error) for one in streams), "", target="<= 0")
    yield origin.line(
        case, "tokens lost, repeated or wrong", wrong.lost + wrong.repeated + wrong.wrong, "", target="<= 0"
    )
    yield origin.line(case, "orders to do both phases", ordered, "", target=">= 1")
