"""The quickstart: its folder, its questions, and asking all of them at once as any client would."""

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import httpx2

from weft.domain.text import sanitize
from weft_cli.errors import CommandError
from weft_cli.output import say, table
from weft_cli.sse import BadEvent, Lines, event_of, refusal_of

DEMO_FILE = "demo.jsonl"
FOLDER = Path("examples") / "quickstart"
ASK_S = 60.0
KEYS_S, KEYS_POLL_S = 30.0, 0.05  # the store brings a key to the gateway within moments
KEY_NOTE = "weft up --demo"


@dataclass(frozen=True, slots=True)
class Question:
    model: str
    prompt: str
    expect: str
    key: str = ""  # an API key that opens the model; "": none is asked for


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """What a model said. `error` is set when it said nothing right."""

    question: Question
    text: str
    total_ms: float
    error: str = ""

    @property
    def right(self) -> bool:
        return not self.error and self.text.strip() == self.question.expect


def demo_folder() -> Path:
    """Find the quickstart beside this command's sources, or in the working directory. Raises CommandError."""
    spec = find_spec("weft")
    roots = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    for root in (*roots, Path.cwd()):
        if (root / FOLDER / DEMO_FILE).is_file():
            return root / FOLDER
    raise CommandError(
        f"there is no {FOLDER} here", "run it from a checkout of weft, or `weft up -f` your own manifests"
    )


def demo_manifests(folder: Path) -> list[Path]:
    """Return the quickstart's manifests, stored next to its questions."""
    return sorted(folder.glob("*.yaml"))


def load_questions(path: Path) -> list[Question]:
    """The questions of a demo.jsonl."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Question(line["model"], line["prompt"], line["expect"]) for line in lines]


def namespaces_of(questions: Sequence[Question]) -> list[str]:
    """The namespaces whose adapters are asked, in order; a base model's name has no namespace."""
    return list(dict.fromkeys(question.model.partition("/")[0] for question in questions if "/" in question.model))


def with_keys(questions: Sequence[Question], keys: Mapping[str, str]) -> list[Question]:
    """Give each question the key of its adapter's namespace. `keys`: by namespace; the base takes the first."""
    first = next(iter(keys.values()))
    return [replace(question, key=keys.get(question.model.partition("/")[0], first)) for question in questions]


async def until_open(url: str, keys: Iterable[str]) -> None:
    """Wait until the gateway accepts these keys, made elsewhere. Raises CommandError after KEYS_S."""
    async with httpx2.AsyncClient(base_url=url, timeout=KEYS_S, trust_env=False) as http:
        try:
            async with asyncio.timeout(KEYS_S):
                for key in keys:
                    while not (await http.get("/v1/models", headers=_bearer(key))).is_success:  # noqa: ASYNC110 (a process)
                        await asyncio.sleep(KEYS_POLL_S)
        except (TimeoutError, httpx2.HTTPError) as error:
            raise CommandError(f"the gateway does not take the demo's keys: {type(error).__name__}") from error


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def ask_all(url: str, questions: Sequence[Question]) -> list[DemoAnswer]:
    """Ask every question at the same time, each streamed."""
    async with httpx2.AsyncClient(base_url=url, timeout=ASK_S, trust_env=False) as http:
        return list(await asyncio.gather(*(ask(http, question) for question in questions)))


async def ask(http: httpx2.AsyncClient, question: Question) -> DemoAnswer:
    """One streamed chat completion."""
    began, pieces = time.perf_counter(), list[str]()
    body = {
        "model": question.model,
        "messages": [{"role": "user", "content": question.prompt}],
        "temperature": 0,
        "max_tokens": 128,
        "stream": True,
    }
    error = ""
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=_bearer(question.key)) as response:
            if not response.is_success:
                error = refusal_of(await response.aread(), response.status_code)
                return DemoAnswer(question, "", 1000 * (time.perf_counter() - began), error)
            lines = Lines()
            async for data in response.aiter_bytes():
                for event in map(event_of, lines.feed(data)):
                    error = event.error or error
                    if event.text:
                        pieces.append(event.text)
    except BadEvent as failure:
        error = f"the gateway sent {failure}"
    except httpx2.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return DemoAnswer(question, "".join(pieces), 1000 * (time.perf_counter() - began), error)


def print_answers(answers: Sequence[DemoAnswer]) -> None:
    """Print a table: model, prompt, answer, right?, ms."""
    say("")
    if sys.stdout.isatty():
        _print_rich(answers)
        return
    rows = [
        (a.question.model, a.question.prompt, a.error or a.text, "yes" if a.right else "NO", f"{a.total_ms:.0f}")
        for a in answers
    ]
    say("\n".join(table(("MODEL", "PROMPT", "ANSWER", "RIGHT", "MS"), rows)))
    say(f"\n{sum(a.right for a in answers)} of {len(answers)} right, asked at the same time")


def _print_rich(answers: Sequence[DemoAnswer]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table("Model", "Prompt", "Answer", "Right", "ms", box=None, header_style="bold")
    for a in answers:
        right = Text("yes", "green") if a.right else Text("NO", "bold red")
        text = Text(sanitize(a.error or a.text))
        grid.add_row(a.question.model, a.question.prompt, text, right, f"{a.total_ms:.0f}")
    console = Console()
    console.print(grid)
    console.print(f"\n{sum(a.right for a in answers)} of {len(answers)} right, asked at the same time")
