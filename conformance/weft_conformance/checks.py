"""`weft conformance`: the checks, as requests to an OpenAI-compatible server. What they promise stands with each."""

import asyncio
import json
import random
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx2

from weft_cli.errors import BadInput, CommandError
from weft_cli.sse import Lines, refusal_of
from weft_conformance.judging import (
    LONG_PROMPTS,
    MIN_ADAPTERS,
    PROMPTS,
    Answer,
    Model,
    Outcome,
    References,
    Result,
    Verdict,
    alike,
    discovered,
    fair,
    judged,
    telling,
    updated,
)

TOKENS = 32
IN_FLIGHT = 16  # of our requests at once, but in the flood
FLOOD, PROBES = 32, 5
ROUNDS = 3
ALTERNATIONS = 40
UPDATE_S = 300.0
TIMEOUT_S = 300.0  # of an answer's silence
UNKNOWN = "conformance-no-such-model"


class Refused(CommandError):
    """The server gave no answer to a request that it should answer."""


class Timed(NamedTuple):
    answer: Answer
    first_token_s: float


class Server:
    """Greedy completions of one server."""

    def __init__(self, client: httpx2.AsyncClient, clock: Callable[[], float]) -> None:
        self._client, self._clock = client, clock
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._passes_cache: dict[str, Any] = {}

    async def models(self) -> list[dict[str, Any]]:
        """Ask `/v1/models`. Raises Refused."""
        answer = await self._client.get("/v1/models")
        if answer.status_code != 200:
            raise Refused(refusal_of(answer.content, answer.status_code))
        return answer.json()["data"]

    async def status(self, body: dict[str, Any]) -> int:
        """Ask a request's status."""
        return (await self._client.post("/v1/completions", json=body)).status_code

    async def find_bypass(self, model: Model) -> bool:
        """Find the fields by which references pass the prefix cache by. Returns False if the server takes none."""
        for fields in ({"cache_salt": "a", "cache_prompt": False}, {"cache_salt": "a"}, {"cache_prompt": False}):
            body: dict[str, Any] = {
                "model": model.name,
                "prompt": PROMPTS[0],
                "max_tokens": 1,
                **model.fields,
                **fields,
            }
            if await self.status(body) == 200:
                self._passes_cache = fields
                return True
        return False

    async def reference(self, model: Model, prompt: str) -> Answer:
        """Ask for an answer that uses nothing of another request. Raises Refused."""
        fields = self._passes_cache
        if "cache_salt" in fields:
            fields = {**fields, "cache_salt": secrets.token_urlsafe(12)}
        return (await self.timed(model, prompt, **fields)).answer

    async def ask(self, model: Model, prompt: str) -> Answer:
        """Ask for a completion. Raises Refused."""
        async with self._room:
            return (await self.timed(model, prompt)).answer

    async def timed(self, model: Model, prompt: str, **fields: Any) -> Timed:
        """Stream a completion and note when its first token came. Raises Refused."""
        body = {"model": model.name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        began, first, texts, lines = self._clock(), None, list[str](), Lines()
        async with self._client.stream("POST", "/v1/completions", json={**body, **model.fields, **fields}) as answer:
            if answer.status_code != 200:
                raise Refused(f"{model.name}: {refusal_of(await answer.aread(), answer.status_code)}")
            async for data in answer.aiter_bytes():
                for line in lines.feed(data):
                    if text := _text(line):
                        first = first or self._clock()
                        texts.append(text)
        return Timed(Answer(model.name, prompt, "".join(texts)), (first or self._clock()) - began)


def _text(line: str) -> str:
    """Read the text of an event of a completion. Raises Refused for one that says an error."""
    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
    if data in ("", "[DONE]"):
        return ""
    event = json.loads(data)
    if "error" in event:
        raise Refused(f"a stream ended with an error: {event['error']}")
    return "".join(choice.get("text") or "" for choice in event.get("choices") or ())


@dataclass(frozen=True, slots=True)
class Trial:
    """A server, its models and their references."""

    server: Server
    base: Model
    adapters: Sequence[Model]
    references: References
    long_references: References
    bypass: bool  # references of long prompts pass the prefix cache by
    update: str | None

    @property
    def models(self) -> list[Model]:
        return [self.base, *self.adapters]


async def listed(trial: Trial) -> Outcome:
    """/v1/models lists base and adapters, each adapter with its base as `parent`"""
    if any(one.fields for one in trial.adapters):
        return Outcome(Verdict.NOT_APPLICABLE, "adapters are selected by fields, not by names")
    parents = {one["id"]: one.get("parent") for one in await trial.server.models()}
    missing = [one.name for one in trial.models if one.name not in parents]
    orphans = [one.name for one in trial.adapters if one.name in parents and parents[one.name] != trial.base.name]
    if missing or orphans:
        return Outcome(Verdict.FAIL, f"not listed: {missing}; without their base as parent: {orphans}")
    return Outcome(Verdict.PASS, f"{len(trial.models)} models")


async def own_answers(trial: Trial) -> Outcome:
    """base and adapters answer in ways of their own, and the same again one after the other"""
    if pairs := alike(trial.references):
        return Outcome(Verdict.FAIL, f"the same answers to {len(trial.references)} prompts: {pairs[0]}")
    prompts = telling(trial.references)
    return judged([await trial.server.ask(model, prompts[0]) for model in trial.models], trial.references)


async def unknown(trial: Trial) -> Outcome:
    """a model that is not there is refused, never answered by the base"""
    status = await trial.server.status({"model": UNKNOWN, "prompt": PROMPTS[0], "max_tokens": 1})
    verdict = Verdict.PASS if 400 <= status < 500 else Verdict.FAIL
    return Outcome(verdict, f"status {status}")


async def beside(trial: Trial) -> Outcome:
    """base and adapters answer at the same time as they do alone"""
    return await _at_once(trial, [(model, p) for p in telling(trial.references) for model in trial.models] * ROUNDS)


async def slots(trial: Trial) -> Outcome:
    """all adapters at once, more than the server has slots for, answer as they do alone"""
    prompt = telling(trial.references)[0]
    asked = [(model, prompt) for model in trial.adapters]
    outcome = await _at_once(trial, asked + asked[::-1] + asked)
    return Outcome(outcome.verdict, f"{len(trial.adapters)} adapters: {outcome.detail}")


async def prefix_cache(trial: Trial) -> Outcome:
    """a prompt's cached prefix is used for no other model than the one that computed it"""
    if not trial.bypass:
        return Outcome(Verdict.NOT_APPLICABLE, "the server takes neither cache_salt nor cache_prompt for references")
    models, answers = trial.models, list[Answer]()
    for turn, prompt in enumerate(telling(trial.long_references)):
        start = turn % len(models)
        order = models[start:] + models[:start]
        answers += [await trial.server.ask(model, prompt) for model in (*order, *order)]
    if not answers:
        return Outcome(Verdict.NOT_APPLICABLE, "no long prompt tells the models apart")
    return judged(answers, trial.long_references)


async def alternation(trial: Trial) -> Outcome:
    """requests that change the adapter each time, four at once, answer as they do alone"""
    prompts, models = telling(trial.references), trial.models
    asked = [(models[turn % len(models)], prompts[turn % len(prompts)]) for turn in range(ALTERNATIONS)]
    waiting, answers = iter(asked), list[Answer]()

    async def client() -> None:
        for model, prompt in waiting:
            answers.append(await trial.server.ask(model, prompt))

    await asyncio.gather(*(client() for _ in range(4)))
    return judged(answers, trial.references)


async def starvation(trial: Trial) -> Outcome:
    """a rarely used adapter's first token comes beside a flood of another's requests as soon as the flood's own"""
    busy, rare = trial.adapters[:2]
    alone = await trial.server.timed(rare, PROMPTS[0])
    async with _load(trial, busy, FLOOD) as flood:
        await asyncio.wait_for(flood.full.wait(), TIMEOUT_S)
        probes = [await trial.server.timed(rare, PROMPTS[turn % len(PROMPTS)]) for turn in range(PROBES)]
    outcome = fair(
        [one.first_token_s for one in probes], [one.first_token_s for one in flood.done], alone.first_token_s
    )
    right = judged([one.answer for one in probes], trial.references)
    return right if right.verdict is Verdict.FAIL and telling(trial.references) == list(PROMPTS) else outcome


async def update(trial: Trial) -> Outcome:
    """while an adapter's content is replaced, each answer is of the old content or of the new one"""
    if trial.update is None:
        return Outcome(Verdict.NOT_APPLICABLE, "no --update COMMAND was given")
    changed = trial.adapters[0]
    async with _load(trial, changed, 4) as load:
        await asyncio.wait_for(load.full.wait(), TIMEOUT_S)
        process = await asyncio.create_subprocess_shell(trial.update, stdout=sys.stderr)
        if code := await asyncio.wait_for(process.wait(), UPDATE_S):
            raise CommandError(f"--update: the command ended with {code}")
        before = len(load.done)
        while len(load.done) < before + 4 * len(PROMPTS):  # answers that began behind the command
            await load.one_more()
    new = {prompt: (await trial.server.reference(changed, prompt)).text for prompt in PROMPTS}
    old = {prompt: texts[changed.name] for prompt, texts in trial.references.items()}
    return updated([one.answer for one in load.done], old, new)


CHECKS: tuple[Callable[[Trial], Awaitable[Outcome]], ...] = (
    listed, own_answers, unknown, beside, slots, prefix_cache, alternation, starvation, update,
)  # fmt: skip
NEED_TELLING = (beside, slots, alternation)


async def run(
    client: httpx2.AsyncClient, base: Model | None, adapters: Sequence[Model], update_command: str | None,
    report: Callable[[Result], None], clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Model], list[Result]]:  # fmt: skip
    """Run every check in its order, and report each when it is done. Raises BadInput, Refused, httpx2.HTTPError."""
    server = Server(client, clock)
    if not adapters:
        name, names = discovered(await server.models(), base.name if base else None)
        base, adapters = base or Model(name), [Model(one) for one in names]
    if base is None or len(adapters) < MIN_ADAPTERS:
        raise BadInput(f"a base and at least {MIN_ADAPTERS} adapters are compared", "give --base and --adapter")
    bypass = await server.find_bypass(base)
    models = [base, *adapters]
    short, long = [
        {prompt: {model.name: (await server.reference(model, prompt)).text for model in models} for prompt in prompts}
        for prompts in (PROMPTS, LONG_PROMPTS)
    ]
    trial = Trial(server, base, adapters, short, long, bypass, update_command)
    results: list[Result] = []
    for check in CHECKS:
        try:
            if check in NEED_TELLING and not telling(short):
                outcome = Outcome(Verdict.NOT_APPLICABLE, "no prompt tells the models apart")
            else:
                outcome = await check(trial)
        except (Refused, TimeoutError, httpx2.HTTPError) as error:
            outcome = Outcome(Verdict.FAIL, str(error) or type(error).__name__)
        promise = " ".join((check.__doc__ or "").split())
        results.append(Result(check.__name__.replace("_", "-"), promise, outcome.verdict, outcome.detail))
        report(results[-1])
    return models, results


async def _at_once(trial: Trial, asked: Sequence[tuple[Model, str]]) -> Outcome:
    order = random.Random(0).sample(asked, len(asked))  # noqa: S311
    return judged(await asyncio.gather(*(trial.server.ask(*one) for one in order)), trial.references)


class _Load:
    """The answers to requests of one model that `clients` send without end."""

    def __init__(self, trial: Trial, model: Model, clients: int) -> None:
        self.done: list[Timed] = []
        self.full = asyncio.Event()  # every client has had an answer
        self._more = asyncio.Event()
        self._trial, self._model, self._clients = trial, model, clients

    async def client(self, first: int) -> None:
        turn = first
        while True:
            self.done.append(await self._trial.server.timed(self._model, PROMPTS[turn % len(PROMPTS)]))
            turn += 1
            self._more.set()
            if len(self.done) >= self._clients:
                self.full.set()

    async def one_more(self) -> None:
        self._more.clear()
        await asyncio.wait_for(self._more.wait(), TIMEOUT_S)


@asynccontextmanager
async def _load(trial: Trial, model: Model, clients: int) -> AsyncGenerator[_Load]:
    """Keep a load on the server in the block. A client that fails ends the whole. Raises Refused."""
    load = _Load(trial, model, clients)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(load.client(first)) for first in range(clients)]
            yield load
            for task in tasks:
                task.cancel()
    except* Refused as refused:
        raise refused.exceptions[0] from None
