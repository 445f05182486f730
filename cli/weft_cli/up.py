"""The command `weft up`: the whole stack in the foreground until Ctrl-C."""

import asyncio
import contextlib
import json
import shlex
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from weft.api.readiness import is_failing, is_ready, is_refused, state_of
from weft.process import CannotStart, keep_heap_small
from weft.telemetry.progress import progress_text
from weft_cli.client import Object
from weft_cli.demo import (
    DEMO_FILE,
    KEY_NOTE,
    Question,
    ask_all,
    demo_folder,
    demo_manifests,
    load_questions,
    namespaces_of,
    print_answers,
    until_open,
    with_keys,
)
from weft_cli.errors import BadInput, CommandError
from weft_cli.kernels import prepare_kernels
from weft_cli.objects import load_manifests
from weft_cli.options import running_data_dir
from weft_cli.output import note, say
from weft_cli.progress import Progress, Signals
from weft_operator.core import Ref
from weft_operator.errors import LocalApiError, StackError
from weft_operator.local.components import RUNNER, Options
from weft_operator.local.objects import ref_of
from weft_operator.local.stack import Stack, running

T = TypeVar("T")

READY_S = 120.0  # without anything that moves
LOOK_S = 0.25  # until the next look at what is copied
GATHER_S = 0.05  # many objects change together: looking at all of them for each one would be quadratic


def up(
    *,
    data_dir: Path,
    port: int,
    auth: bool,
    file_root: Path | None,
    files: Sequence[Path],
    demo: bool,
    exit_after: bool,
    executor: str | None,
    log_level: str,
    allowed_hosts: tuple[str, ...] = (),
    cors_origins: tuple[str, ...] = (),
    prefix_sharing: bool = True,
    runner: tuple[str, ...] = RUNNER,
) -> int:
    """Run the stack. Returns the exit code; raises CommandError. `runner`: see Options."""
    questions: list[Question] = []
    if demo:
        if files:
            raise BadInput("--demo brings its own manifests", "leave out --demo, or leave out -f")
        folder = demo_folder()
        questions, files, file_root = load_questions(folder / DEMO_FILE), demo_manifests(folder), file_root or folder
    objects = load_manifests(files) if files else []
    root = file_root or root_of(files)
    options = Options(
        data_dir, port, auth, root, executor, log_level, allowed_hosts=allowed_hosts, cors_origins=cors_origins,
        prefix_sharing=prefix_sharing, runner=runner,
    )  # fmt: skip
    return run_stack(options, objects, questions, exit_after=exit_after)


def run_stack(
    options: Options,
    objects: Sequence[Object],
    questions: Sequence[Question] = (),
    *,
    exit_after: bool = False,
    keep: bool = True,
) -> int:
    """Apply the objects and serve until Ctrl-C. Returns the exit code; raises CommandError.

    `keep`: beside what was applied to this data directory before; else instead of it.
    """
    prepare_kernels(options.executor)
    keep_heap_small()
    try:
        return asyncio.run(_run(options, objects, questions, exit_after=exit_after, keep=keep))
    except StackError as error:
        failure = BadInput if error.exit_code == 2 else CommandError
        raise failure(str(error)) from error
    except CannotStart as error:
        raise BadInput(str(error)) from error
    except LocalApiError as error:
        raise BadInput(error.message) from error


async def _run(
    options: Options, objects: Sequence[Object], questions: Sequence[Question], *, exit_after: bool, keep: bool
) -> int:
    stop = asyncio.Event()
    serving = Signals(stop)
    progress = Progress()
    note(f"weft: data in {options.data_dir}")
    try:
        async with running(options, objects, progress, keep=keep) as stack:
            serving.stack = stack
            # What was applied before is served as well; the demo answers for its own objects only.
            awaited = [ref_of(obj) for obj in (objects if questions else stack.store.objects())]
            needed = [ref for ref in awaited if ref.kind == "ServingPool" and not keep]  # without it there is nothing
            async with _showing_copies(stack.addresses.depot_url, progress):
                start = _bring_up(stack, awaited, progress, all_ready=bool(questions), needed=needed)
                missing = await _first(stop, start)
            if missing is None:
                return 1
            if questions and options.auth:
                questions = await _with_keys(stack, questions)
            right = await _demo(stack, questions) if questions else not missing
            if exit_after:
                return 0 if right else 1
            _banner(stack, questions)
            await _first(stop, stack.failed())
            note("weft: stopping (Ctrl-C again to kill)")
        return 0
    except asyncio.CancelledError:
        note("weft: stopped")
        return 1


async def _bring_up(
    stack: Stack, refs: Sequence[Ref], progress: Progress, *, all_ready: bool, needed: Sequence[Ref] = ()
) -> list[str]:
    """Wait until every object is ready or refused, or nothing has moved for READY_S. Returns why some are not ready.

    With `all_ready` a refusal ends the wait with CommandError, and so does the time; without it only the refusal of a
    pool that is `needed`, or the end of its runners again and again.
    """
    changed, reported = asyncio.Event(), set[Ref]()
    stack.store.listen(lambda _: changed.set())
    while True:
        changed.clear()
        waiting, refused = _undecided(stack, refs, reported, progress)
        lost = [
            state_of(obj) for ref in needed if (obj := stack.store.find(ref)) and (is_refused(obj) or is_failing(obj))
        ]
        if lost or (refused and all_ready):
            raise CommandError("; ".join(lost or refused))
        if not waiting:
            return refused
        if (left_s := progress.moved + READY_S - time.monotonic()) <= 0:
            break
        with contextlib.suppress(TimeoutError):  # looks again: bytes may have moved
            await asyncio.wait_for(changed.wait(), left_s)
            await asyncio.sleep(GATHER_S)
    if all_ready:
        raise CommandError(f"not ready after {READY_S:.0f} s: " + "; ".join([*waiting, *refused]))
    for state in waiting:  # what can be served is; the rest may still come
        progress.line(state, f"not ready after {READY_S:.0f} s")
    return [*waiting, *refused]


@asynccontextmanager
async def _showing_copies(depot_url: str, progress: Progress) -> AsyncGenerator[None]:
    """Show the copies of the depot. The work of runners appears with their states."""
    showing = asyncio.create_task(_show_copies(depot_url, progress))
    try:
        yield
    finally:
        showing.cancel()
        progress.close()


async def _show_copies(depot_url: str, progress: Progress) -> None:
    shown = frozenset[str]()
    async with httpx2.AsyncClient(base_url=depot_url, trust_env=False) as http:
        while True:
            with contextlib.suppress(httpx2.HTTPError):  # a bar that stands still: the depot's own state says why
                jobs = (await http.get("/v1/operations")).raise_for_status().json()["operations"]
                texts = {job["uri"]: progress_text(job["doing"], job["doneBytes"], job["totalBytes"]) for job in jobs}
                for uri in shown - texts.keys():
                    progress.doing(uri, "")
                for uri, text in texts.items():
                    progress.doing(uri, text)
                shown = frozenset(texts)
            await asyncio.sleep(LOOK_S)


def _undecided(
    stack: Stack, refs: Sequence[Ref], reported: set[Ref], progress: Progress
) -> tuple[list[str], list[str]]:
    """List awaited and refused objects. Each decision is reported once."""
    waiting, refused = list[str](), list[str]()
    for ref in refs:
        obj = stack.store.find(ref)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            continue
        ready, no = is_ready(obj), is_refused(obj) or _waits_in_vain(stack, obj)
        if (ready or no) and ref not in reported:
            reported.add(ref)
            progress.line(f"{ref.kind} {ref}", "ready" if ready else state_of(obj))
        if not ready:
            (refused if no else waiting).append(state_of(obj))
    return waiting, refused


def _waits_in_vain(stack: Stack, obj: Any) -> bool:
    """Return whether an object is an adapter in a refused pool."""
    if obj["kind"] != "LoRAAdapter":
        return False
    pool_ref = obj["spec"]["poolRef"]
    pool = stack.store.find(
        Ref("ServingPool", pool_ref.get("namespace") or obj["metadata"]["namespace"], pool_ref["name"])
    )
    return pool is not None and is_refused(pool)


async def _demo(stack: Stack, questions: Sequence[Question]) -> bool:
    """Ask the base and every adapter at the same time; print what they answer. Returns whether all is right."""
    answers = await ask_all(stack.addresses.gateway_url, questions)
    print_answers(answers)
    return all(answer.right for answer in answers)


async def _with_keys(stack: Stack, questions: Sequence[Question]) -> list[Question]:
    """Give each question a key that the gateway takes; the keys of the demo's last run are revoked."""
    from weft_cli.keys import replace_keys
    from weft_cli.runners import SupervisorClient

    supervisor = SupervisorClient((stack.addresses.supervisor,))
    keys = await asyncio.to_thread(replace_keys, supervisor, namespaces_of(questions), KEY_NOTE)
    await until_open(stack.addresses.gateway_url, keys.values())
    return with_keys(questions, keys)


async def _first(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do the work unless told to stop before; returns None when told to stop."""
    stopped, doing = asyncio.create_task(stop.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait([stopped, doing], return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        stopped.cancel()
        doing.cancel()


def _banner(stack: Stack, questions: Sequence[Question]) -> None:
    there = _data_dir_flag(stack.options.data_dir)
    url, auth = f"{stack.addresses.gateway_url}/v1", stack.options.auth
    say(f"\nOpenAI API   {url}\nStatus page  {stack.addresses.gateway_url}/\n")
    if (example := _example(stack, questions)) is None:
        commands = f"`weft apply -f MANIFESTS{there}` adds pools and adapters, `weft get spool -A{there}` shows them"
        say(f"Nothing is served yet: {commands}.")
    else:
        _call(url, auth, *example)
    if auth:
        keys = {question.model.partition("/")[0]: question.key for question in questions if "/" in question.model}
        for namespace, key in keys.items():
            say(f"API key of {namespace}: {key}")
        say(f"API keys: `weft key create --namespace NAME{there}`")
    commands = ", ".join(f"`weft {words}{there}`" for words in ("get lora -A", "status", "logs gateway -F"))
    say(f"From another terminal: {commands}. Ctrl-C stops everything.")


def _data_dir_flag(folder: Path) -> str:
    """Return the flag by which other commands find a stack outside the usual place."""
    return "" if folder == running_data_dir(None) else f" --data-dir {shlex.quote(str(folder))}"


def _call(url: str, auth: bool, model: str, text: str, key: str) -> None:
    """Print the same request with curl and in Python. `key`: "" where none is known."""
    header = f'-H "Authorization: Bearer {key or "$WEFT_API_KEY"}" ' if auth else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]})
    say(f"  curl {url}/chat/completions {header}-H 'Content-Type: application/json' \\\n    -d '{body}'\n")
    say("  from openai import OpenAI")
    say(f'  client = OpenAI(base_url="{url}", api_key="{key or ("..." if auth else "none")}")')
    say(f'  messages = [{{"role": "user", "content": "{text}"}}]')
    say(f'  print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message.content)\n')


def _example(stack: Stack, questions: Sequence[Question]) -> tuple[str, str, str] | None:
    """Choose a model that is served, best an adapter, something to ask it, and a key; None: nothing is served."""
    if questions:
        question = questions[min(1, len(questions) - 1)]
        return question.model, question.prompt, question.key
    ready = [obj for obj in stack.store.objects() if is_ready(obj)]
    adapters = [obj["status"]["modelName"] for obj in ready if obj["kind"] == "LoRAAdapter"]
    bases = [
        obj["spec"]["model"].get("name") or obj["metadata"]["name"] for obj in ready if obj["kind"] != "LoRAAdapter"
    ]
    return next(((name, "Hello", "") for name in (*adapters, *bases)), None)


def root_of(files: Sequence[Path]) -> Path | None:
    """The file root: with manifests it is their folder. Raises BadInput when they have several."""
    folders = {(path if path.is_dir() else path.parent).resolve() for path in files}
    if len(folders) > 1:
        raise BadInput("the manifests are in several folders, so `file:` has no one root", "name it with --file-root")
    return next(iter(folders), None)
