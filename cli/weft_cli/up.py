"""`weft up`: the whole stack in the foreground until Ctrl-C."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft_cli.client import Object
from weft_cli.demo import DEMO_FILE, Question, ask_all, demo_folder, load_questions
from weft_cli.errors import BadInput, CommandError
from weft_cli.objects import load_manifests
from weft_cli.output import note, say
from weft_operator.errors import ApiError, StackError
from weft_operator.local.components import Options
from weft_operator.local.processes import ProcessState
from weft_operator.local.stack import Stack, running
from weft_operator.resources import Ref

READY_S = 120.0
SHOWN = ("Ready", "Backoff")


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
) -> int:
    """Run the stack. Returns the exit code; raises CommandError."""
    questions: list[Question] = []
    if demo:
        if files:
            raise BadInput("--demo brings its own manifests", "leave out --demo, or leave out -f")
        if auth:
            raise BadInput("--demo sends requests without a key", "leave out --auth")
        folder = demo_folder()
        questions, files, file_root = load_questions(folder / DEMO_FILE), [folder], file_root or folder
    objects = load_manifests(files) if files else []
    options = Options(data_dir, port, auth, file_root or _root_of(files), executor, log_level)
    try:
        return asyncio.run(_run(options, objects, questions, exit_after=exit_after))
    except StackError as error:
        failure = BadInput if error.exit_code == 2 else CommandError
        raise failure(str(error)) from error
    except ApiError as error:
        raise BadInput(error.message) from error


async def _run(options: Options, objects: Sequence[Object], questions: Sequence[Question], *, exit_after: bool) -> int:
    stop = asyncio.Event()
    serving = _Signals(stop)
    progress = Progress()
    note(f"weft: data in {options.data_dir}")
    try:
        async with running(options, objects, progress) as stack:
            serving.graceful = True
            if await _first(stop, _bring_up(stack, objects, questions, progress)):
                return 1
            failed = bool(questions) and not await _demo(stack, questions)
            if exit_after:
                return 1 if failed else 0
            _banner(stack, questions)
            await _first(stop, stack.failed())
            note("weft: stopping (Ctrl-C again to kill)")
        return 0
    except asyncio.CancelledError:
        note("weft: stopped")
        return 1


async def _bring_up(
    stack: Stack, objects: Sequence[Object], questions: Sequence[Question], progress: "Progress"
) -> None:
    """Wait until what was applied is decided; with a demo, until all of it is ready. Raises CommandError."""
    refs = [Ref(obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in objects]
    try:
        async with asyncio.timeout(READY_S):
            await _until(stack, refs, progress, settled=not questions)
    except TimeoutError:
        waiting = [_state(stack.store.get(ref)) for ref in refs if not _is_ready(stack.store.get(ref))]
        raise CommandError(f"not ready after {READY_S:.0f} s: " + "; ".join(waiting)) from None


async def _until(stack: Stack, refs: Sequence[Ref], progress: "Progress", *, settled: bool) -> None:
    since, told = stack.store.version, set[Ref]()
    changes = stack.store.watch(since)
    while True:
        waiting = [ref for ref in refs if not _is_ready(stack.store.get(ref))]
        for ref in (ref for ref in refs if ref not in waiting and ref not in told):
            told.add(ref)
            progress.line(f"{ref.kind} {ref}", "ready")
        refused = [ref for ref in waiting if _is_refused(stack.store.get(ref))]
        if not settled and refused:
            raise CommandError("; ".join(_state(stack.store.get(ref)) for ref in refused))
        if len(waiting) == (len(refused) if settled else 0):
            for ref in refused:
                progress.line(f"{ref.kind} {ref}", _state(stack.store.get(ref)))
            return
        await anext(changes)


async def _demo(stack: Stack, questions: Sequence[Question]) -> bool:
    """Ask the base and every adapter at the same time; print what they answer. True when all is right."""
    answers = await ask_all(stack.addresses.gateway_url, questions)
    from weft_cli.demo import print_answers

    print_answers(answers)
    return all(answer.right for answer in answers)


async def _first(stop: asyncio.Event, work: Any) -> bool:
    """Do the work unless told to stop before; True when told to stop."""
    told, doing = asyncio.create_task(stop.wait()), asyncio.ensure_future(work)
    try:
        await asyncio.wait([told, doing], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return told.done()
    finally:
        told.cancel()
        doing.cancel()


def _banner(stack: Stack, questions: Sequence[Question]) -> None:
    url = f"{stack.addresses.gateway_url}/v1"
    model = questions[1].model if len(questions) > 1 else "MODEL"
    text = questions[1].prompt if len(questions) > 1 else "Hello"
    key = "-H 'Authorization: Bearer $WEFT_API_KEY' " if stack.options.auth else ""
    say(f"\nOpenAI API   {url}\nStatus page  {stack.addresses.gateway_url}/\n")
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{text}"}}]}}'
    say(f"  curl {url}/chat/completions {key}-H 'Content-Type: application/json' \\\n    -d '{body}'\n")
    say("  from openai import OpenAI")
    say(f'  client = OpenAI(base_url="{url}", api_key="{"..." if stack.options.auth else "none"}")')
    say(f'  messages = [{{"role": "user", "content": "{text}"}}]')
    say(f'  print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message.content)\n')
    if stack.options.auth:
        say("API keys: `weft key create --namespace NAME`")
    say("From another terminal: `weft get lora -A`, `weft status`, `weft logs gateway -F`. Ctrl-C stops everything.")


class _Signals:
    """The first Ctrl-C (or SIGTERM) stops in order, or at once while starting; a second one kills."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop, self.graceful = stop, False
        self._main = asyncio.current_task()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._heard)

    def _heard(self) -> None:
        if self.graceful and not self._stop.is_set():
            self._stop.set()
        elif self._main:
            self._main.cancel()


class Progress:
    """A line for each thing that starts; in place of it a spinner that names what is awaited, on a terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seen: dict[str, str] = {}
        self._fancy = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, name: str, state: ProcessState) -> None:
        if state.phase in SHOWN and self._seen.get(name) != state.phase:
            self._seen[name] = state.phase
            self.line(name, "ready" if state.phase == "Ready" else f"ended, starts again: {state.detail}")

    def line(self, what: str, state: str) -> None:
        """Something has got somewhere."""
        mark = "ok " if state == "ready" else ".. "
        if self._fancy:
            mark = f"\x1b[32m{mark}\x1b[0m" if state == "ready" else f"\x1b[33m{mark}\x1b[0m"
        with contextlib.suppress(BrokenPipeError):
            note(f"{mark}{time.monotonic() - self._began:5.1f} s  {what:<36} {state}")


def _root_of(files: Sequence[Path]) -> Path | None:
    """With manifests the file root is their folder. Raises BadInput when they have several."""
    folders = {(path if path.is_dir() else path.parent).resolve() for path in files}
    if len(folders) > 1:
        raise BadInput("the manifests are in several folders, so `file:` has no one root", "name it with --file-root")
    return next(iter(folders), None)


def _is_ready(obj: Any) -> bool:
    """Served: an adapter that is Ready, a pool that is Available."""
    status = obj.get("status", {})
    wanted = "Ready" if obj["kind"] == "LoRAAdapter" else "Available"
    current = status.get("observedGeneration") == obj["metadata"]["generation"]
    return current and any(c["type"] == wanted and c["status"] == "True" for c in status.get("conditions", ()))


def _is_refused(obj: Any) -> bool:
    """Decided, and not for it: it will not be ready unless somebody changes something."""
    status = obj.get("status", {})
    if status.get("observedGeneration") != obj["metadata"]["generation"]:
        return False
    decisive = ("Accepted", "Validated", "Fetched")
    if any(c["reason"] == "PoolNotFound" for c in status["conditions"]):
        return True
    return any(c["type"] in decisive and c["status"] == "False" for c in status["conditions"])


def _state(obj: Any) -> str:
    wanted = "Ready" if obj["kind"] == "LoRAAdapter" else "Available"
    found = next((c for c in obj.get("status", {}).get("conditions", ()) if c["type"] == wanted), None)
    what = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
    return f"{what}: {found['reason']}: {found['message']}" if found else f"{what}: nothing known yet"
