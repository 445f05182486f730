"""The command `weft top`: runners and adapters from the supervisor's Admin, the queue from the gateway."""

import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weft.domain.adapter import Tier
from weft.domain.request import Priority
from weft.domain.runner import RunnerBook
from weft.domain.text import sanitize
from weft_cli.errors import CommandError
from weft_cli.keyboard import Keyboard, rest
from weft_cli.output import say, table
from weft_cli.runners import SupervisorClient, books, head_of
from weft_cli.sse import refusal_of
from weft_cli.top_figures import (
    ADAPTER_HEADERS,
    OFFLOAD_HEADERS,
    POOL_HEADERS,
    RUNNER_HEADERS,
    GatewayNow,
    Look,
    RunnerNow,
    SequenceNow,
    Tables,
    tables_of,
)

GATEWAY_S = 5.0


@dataclass(frozen=True, slots=True)
class FigureSources:
    """The services that give the figures. Without a gateway's URL nothing is known of the queue, nor of names."""

    supervisor: SupervisorClient
    gateway_url: str | None
    key: str | None = None


def top(sources: FigureSources, interval_s: float, *, once: bool) -> None:
    """Show the tables repeatedly until `q` or Ctrl-C. With `once`, or without a terminal, show them once."""
    if once or not sys.stdout.isatty():
        previous = look(sources)
        rest(interval_s)
        _print(tables_of(previous, look(sources)))
        return
    console = Console()
    if console.is_dumb_terminal or not console.is_terminal:  # rich draws nothing anew there
        with Keyboard() as keyboard:
            for tables in _follow(sources, interval_s, keyboard):
                _print(tables)
                say("")
        return
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        for tables in _follow(sources, interval_s, keyboard):
            live.update(_drawn(tables), refresh=True)


def _follow(sources: FigureSources, interval_s: float, keyboard: Keyboard) -> Generator[Tables]:
    """Yield the tables now, as yet without rates, and again after each interval."""
    previous = None
    while True:
        now = look(sources)
        yield tables_of(previous, now)
        previous = now
        if keyboard.quits_within(interval_s):
            return


def look(sources: FigureSources) -> Look:
    """Read everything as it is now. Raises CommandError."""
    runners = sorted(map(runner_of, books(sources.supervisor)), key=lambda runner: (runner.pool, runner.name))
    gateway = _gateway(sources.gateway_url, sources.key) if sources.gateway_url else None
    return Look(time.monotonic(), tuple(runners), gateway)


def runner_of(book: RunnerBook) -> RunnerNow:
    """Read a runner's state as the figures need it."""
    spec, figures = book.spec, book.figures
    progress = book.progress or [0] * len(book.sequences)
    return RunnerNow(
        incarnation=(spec.runner.uuid, spec.runner.incarnation),
        name=spec.name or head_of(spec.runner.uuid),
        pool=spec.pool,
        ready=figures.ready,
        draining=figures.draining,
        tokens=figures.tokens,
        free_pages=figures.free_pages,
        total_pages=spec.total_pages,
        max_sequences=spec.max_sequences,
        sequences=tuple(
            SequenceNow(
                (sequence.request_id, sequence.epoch.term, sequence.epoch.counter),
                sequence.adapter,
                tokens,
                sequence.priority is Priority.BATCH,
            )
            for sequence, tokens in zip(book.sequences.values(), progress, strict=False)
        ),
        on_device=frozenset(adapter.digest for adapter in book.adapters.values() if adapter.tier is Tier.DEVICE),
        role=figures.role.value,
        pending_prompt_tokens=figures.pending_prompt_tokens,
        offload=figures.offload,
        drafts=figures.drafts,
        accepted_tokens=figures.accepted_tokens,
    )


def gateway_of(status: Mapping[str, Any]) -> GatewayNow:
    """Read the gateway's `/status`."""
    return GatewayNow(
        in_flight=status["in_flight"],
        waiting=status["held"],
        waiting_of={pool["name"]: pool["held"] - pool.get("held_lines", 0) for pool in status["pools"]},
        names={model["digest"]: model["id"] for model in status["models"] if model["digest"]},
    )


def _gateway(url: str, key: str | None) -> GatewayNow:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.get(f"{url.rstrip('/')}/status", headers=headers, timeout=GATEWAY_S, trust_env=False)
        if not answer.is_success:
            raise CommandError(f"the gateway at {url} refuses: {refusal_of(answer.content, answer.status_code)}")
        return gateway_of(answer.json())
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeEncodeError) as error:
        raise CommandError(f"no gateway answers at {url}: {error}", "`weft status` shows this stack's") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{url} is no gateway of weft: its /status is something else") from error


def _print(tables: Tables) -> None:
    say(tables.summary)
    for headers, rows in _tables(tables):
        say("")
        say("\n".join(table(headers, rows)))


def _drawn(tables: Tables) -> RenderableType:
    parts: list[RenderableType] = [Text(sanitize(tables.summary), "bold")]
    for headers, rows in _tables(tables):
        grid = Table(*headers, box=None, header_style="bold", padding=(0, 3, 0, 0))
        for row in rows:
            grid.add_row(*(Text(sanitize(cell)) for cell in row))
        parts += [Text(), grid]
    return Group(
        *parts,
        Text(),
        Text("q ends. Tokens: of prompts and answers; PROMPTS: still to come; LINES: of batches.", "dim"),
    )


def _tables(tables: Tables) -> list[tuple[tuple[str, ...], Any]]:
    all_of_them = (
        (RUNNER_HEADERS, tables.runners), (POOL_HEADERS, tables.pools), (OFFLOAD_HEADERS, tables.offloaded),
        (ADAPTER_HEADERS, tables.adapters),
    )  # fmt: skip
    return [(headers, rows) for headers, rows in all_of_them if rows]
