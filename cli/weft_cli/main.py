"""The command line. What a command needs is imported when it runs, so that `weft --help` answers at once."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup
from typer.main import get_command

from weft.process import long_lived_imports, serve_root
from weft_cli.batch_commands import batch_app
from weft_cli.errors import BadInput, CommandError
from weft_cli.key_commands import key_app
from weft_cli.limit_commands import limit_app, usage
from weft_cli.options import (
    AllowedHosts,
    CorsOrigins,
    DataDir,
    Files,
    GatewayUrl,
    Key,
    LogLevel,
    Namespace,
    PrefixSharing,
    SupervisorAt,
    TlsDir,
    checked_data_dir,
    checked_hosts,
    checked_origins,
    gateway_of,
    kinds,
    names_of,
    on_stack,
    plural,
)
from weft_cli.plan import plan_app

if TYPE_CHECKING:
    from weft_cli.stack import StackClient

USAGE = 2
INTERRUPTED = 130
PLURALS = {"keys": "key", "limits": "limit"}


class Commands(TyperGroup):
    """The commands, which may be called in the plural as well, as kubectl's resources."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, PLURALS.get(cmd_name, cmd_name))


app = typer.Typer(
    name="weft",
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Serves thousands of LoRA adapters on shared base models.

    **Try it:**  `weft up --demo` starts everything on this machine with a small real model and six adapters.

    **Your own:**  `weft serve MODEL --adapters FOLDER`, or `weft up -f manifests/`; then from another terminal:

    - `weft get lora -A`  what is served, and why something is not

    - `weft chat acme/upper "hello"`  ask a model

    - `weft batch run in.jsonl -o out.jsonl`  ask many, when there is room

    - `weft top`  what the runners do now

    - `weft apply -f adapter.yaml`  add or change an adapter, without restarting anything

    - `weft describe lora upper -n acme`  conditions, and on which runner it is

    Exit codes: 0 done, 1 it failed, 2 the command line or a manifest is wrong.
    """,
)
app.add_typer(batch_app, name="batch", rich_help_panel="Stack")
app.add_typer(key_app, name="key")
app.add_typer(limit_app, name="limit")
app.command(rich_help_panel="Stack")(usage)
app.add_typer(plan_app, name="plan", rich_help_panel="Tools")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code: 0 done, 1 failed, 2 bad input."""
    streams = sys.stdout, sys.stderr
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    finally:
        sys.stdout, sys.stderr = streams  # typer puts others there when a pipe breaks
        for stream in streams:
            _flush(stream)


def complete_for_kubectl() -> int:
    """What kubectl asks for `kubectl weft WORDS<TAB>`: a completion a line, then cobra's directive (no file names)."""
    words = ["weft", *sys.argv[1:]]
    bash = {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    os.environ.update(bash)
    with contextlib.suppress(SystemExit):  # how typer ends a completion
        main([])
    sys.stdout.write("\n:4\n")
    return 0


def _run(args: list[str]) -> int:
    try:
        commands = _commands(with_bench=args[:1] == ["bench"] or args in (["--help"], ["-h"]))
        result = commands(args, prog_name="weft", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except CommandError as error:
        return _failed(error)
    except typer.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # whoever read our output has enough
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):
            return 0  # the same, as typer tells it
        raise
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        if (code := _usage(error)) is not None:
            return code
        raise


@app.command(rich_help_panel="Stack")
def up(
    files: Files = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Apply the quickstart, ask every model, print the answers.")
    ] = False,
    exit_after: Annotated[
        bool, typer.Option("--exit", help="Stop when everything is ready (and the demo is over).")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI API, on 127.0.0.1.")] = 8080,
    directory: DataDir = None,
    auth: Annotated[bool, typer.Option("--auth/--no-auth", help="Ask clients for API keys.")] = False,
    allowed_hosts: AllowedHosts = None,
    cors_origins: CorsOrigins = None,
    prefix_sharing: PrefixSharing = True,
    file_root: Annotated[
        Path | None,
        typer.Option(
            help="`file:` URIs are below this folder. Default: the folder of the manifests.", show_default=False
        ),
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="How runners compute; default: the runner's own.", hidden=True)
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="Of every component.")] = LogLevel.INFO,
) -> int:
    """Run the whole stack on this machine, in the foreground.

    - `weft up --demo`  with a small real model

    - `weft up --demo --exit`  the same as a check: exit code 0 when every answer is right

    - `weft up -f manifests/`  with your own pools and adapters; `file:` URIs are below that folder

    - `weft up`  with what was applied before
    """
    if auth and (allowed_hosts or not prefix_sharing):
        raise BadInput("--allowed-hosts and --no-prefix-sharing have no effect with --auth", "leave them out")
    with long_lived_imports():
        from weft_cli.up import up as run

    return run(
        data_dir=checked_data_dir(directory),
        port=port,
        auth=auth,
        allowed_hosts=checked_hosts(allowed_hosts),
        cors_origins=checked_origins(cors_origins, auth=auth),
        prefix_sharing=prefix_sharing,
        file_root=_existing(file_root),
        files=files or [],
        demo=demo,
        exit_after=exit_after,
        executor=executor,
        log_level=log_level.value,
    )


@app.command(rich_help_panel="Stack")
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder, ORG/NAME[@REVISION] of a Hugging Face hub, or an s3:// URI.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--filename", "-f", help="A manifest of a ServingPool, and perhaps of adapters, instead of a MODEL."
        ),
    ] = None,
    adapters: Annotated[
        list[Path] | None,
        typer.Option("--adapters", help="A folder of adapters, each in a folder that names it; may be given again."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="NAME=FOLDER, NAME=ORG/NAME, or either alone; may be given again."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients send for the base model.", show_default="the folder's, or ORG/NAME")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the OpenAI API, on 127.0.0.1.")] = 8080,
    offload: Annotated[
        Path | None, typer.Option(help="A folder on a fast disk: weights that memory has no room for are read from it.")
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the manifests, as `weft up -f` and a cluster take them, and end.")
    ] = False,
    exit_after: Annotated[bool, typer.Option("--exit", help="Stop when everything is ready.")] = False,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", help="Folder of this stack's data. Default: that of `weft up`, with -serve at its end."
        ),
    ] = None,
    auth: Annotated[bool, typer.Option("--auth/--no-auth", help="Ask clients for API keys.")] = False,
    allowed_hosts: AllowedHosts = None,
    cors_origins: CorsOrigins = None,
    prefix_sharing: PrefixSharing = True,
    executor: Annotated[
        str | None, typer.Option(help="How the runner computes; default: the runner's own.", hidden=True)
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="Of every component.")] = LogLevel.INFO,
) -> int:
    """Serve a model and its LoRA adapters on this machine, in the foreground.

    - `weft serve models/llama --adapters adapters/`  a folder, and every adapter in another

    - `weft serve Qwen/Qwen3-0.6B --adapter support=./lora`  from a Hugging Face hub, through its cache

    - `weft serve models/llama --print > pool.yaml`, then `weft serve -f pool.yaml --adapters adapters/`  with whatever
      else a ServingPool can say: KV pages, how requests queue, how the model writes calls of tools

    It serves what its command line names; what is applied or pushed meanwhile ends with it. `weft up` keeps objects.
    """
    with long_lived_imports():
        from weft_cli.serve import ServeRequest
        from weft_cli.serve import serve as run

    return run(
        ServeRequest(model, adapters or [], adapter or [], name, offload, file),
        data_dir=checked_data_dir(directory or serve_root()),
        port=port,
        auth=auth,
        allowed_hosts=checked_hosts(allowed_hosts),
        cors_origins=checked_origins(cors_origins, auth=auth),
        prefix_sharing=prefix_sharing,
        executor=executor,
        log_level=log_level.value,
        print_only=print_only,
        exit_after=exit_after,
    )


@app.command(rich_help_panel="Stack")
@on_stack
def status(stack: "StackClient") -> None:
    """Show every component: state and process, in a cluster pods. Exit code 1 when one is not ready."""
    stack.show_status()


@app.command(rich_help_panel="Stack")
@on_stack
def logs(
    stack: "StackClient",
    component: Annotated[
        str | None, typer.Argument(help="A component; without one, their names.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-F", help="Go on printing what is written.")] = False,
    tail: Annotated[int, typer.Option(min=-1, help="Lines to begin with; -1: all that is kept.")] = 100,
) -> None:
    """Show the log of a component: `weft logs gateway --follow`."""
    stack.show_logs(component, None if tail < 0 else tail, follow=follow)


@app.command(rich_help_panel="Stack")
@on_stack
def chat(
    stack: "StackClient",
    model: Annotated[str, typer.Argument(help="An adapter or a base model, as `weft get lora -A` names it.")],
    text: Annotated[
        str | None,
        typer.Argument(help="What to ask; - for standard input. Without it: a conversation.", show_default=False),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before everything.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 gives the likeliest text.", show_default="the gateway's: 1")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer, in tokens.", show_default="the gateway's")
    ] = None,
    url: GatewayUrl = None,
    key: Key = None,
) -> int:
    """Talk to a model; the answer comes as it is written.

    - `weft chat acme/upper "hello there"`  one answer

    - `weft chat acme/upper`  a conversation: Ctrl-C ends an answer, twice the session

    - `git diff | weft chat base --system "Explain this change."`  what a pipe brings

    - `weft chat base "hi" --url https://weft.example.com --key KEY`  a stack elsewhere
    """
    from weft_cli.chat import Model
    from weft_cli.chat import chat as run

    return run(Model(model, gateway_of(stack, url), key, temperature, max_tokens), text, system)


@app.command(rich_help_panel="Stack")
@on_stack
def top(
    stack: "StackClient",
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks; rates are over one interval.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, after one interval, as into a pipe.")] = False,
    url: GatewayUrl = None,
    key: Key = None,
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Show the present work of runners, pools and adapters: batch, tokens per second, free pages, waiting requests.

    - `weft top`  a table that follows; q or Ctrl-C ends it

    - `weft top --once --interval 5`  for a script

    - `weft top --context prod`  a cluster

    Where keys are asked for, give one with `--key`: queues by pool, and names instead of digests, are shown only to it.
    """
    from weft_cli.top import FigureSources
    from weft_cli.top import top as run

    gateway = gateway_of(stack, url) if url or not address else None
    run(FigureSources(stack.supervisor(address, tls_dir), gateway, key), interval, once=once)


@app.command(rich_help_panel="Objects")
@on_stack
def apply(stack: "StackClient", files: Files = None) -> None:
    """Create or change objects: `weft apply -f adapter.yaml`, `... | weft apply -f -`."""
    from weft_cli.objects import apply as run

    run(stack.api, files or [])


@app.command(rich_help_panel="Objects")
def convert(files: Files = None) -> None:
    """Rewrite manifests of an earlier form of v1alpha1, and name what has no successor.

    - `weft convert -f manifests/ > today.yaml`  comments are not kept

    - `kubectl get spool,lora -A -o yaml | weft convert -f - | kubectl replace -f -`  the objects of a cluster
    """
    from weft_cli.convert import convert as run

    run(files or [])


@app.command(rich_help_panel="Objects")
@on_stack
def push(
    stack: "StackClient",
    name: Annotated[str, typer.Argument(help="Of the LoRAAdapter.")],
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder with adapter_config.json and adapter_model.safetensors.",
            exists=True,
            file_okay=False,
            readable=True,
        ),
    ],
    version: Annotated[
        str | None, typer.Option(help="A name for this content: requests pin it as MODEL@VERSION.", show_default=False)
    ] = None,
    if_digest: Annotated[
        str | None, typer.Option(help="Publish only if the adapter has this content now; `none`: if it does not exist.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(min=0, max=100, help="Earlier contents that stay served; default: what the adapter says."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(help="Pool of an adapter that does not exist yet: NAME or NAMESPACE/NAME.", show_default=False),
    ] = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it is served; 0: none.")] = 60.0,
    namespace: Namespace = None,
    url: GatewayUrl = None,
    key: Key = None,
) -> None:
    """Send an adapter's files to the depot and publish them: no bucket, no folder that the cluster can read.

    - `weft push upper out/step-100 -n acme --version step-100`  a trainer's newest content

    - `weft push upper out/ --if-digest sha256:...`  only if nobody else has published meanwhile

    - `weft push upper out/ --pool tiny`  a new adapter

    The digest of the content is printed. It is the digest of `x-weft-model-digest` in answers, and pins requests:
    MODEL@sha256:...
    """
    from weft_cli.push import Publication
    from weft_cli.push import push as run

    publication = Publication(
        stack.namespace(namespace), name, version=version, if_digest=if_digest, keep=keep, pool=pool
    )
    run(stack.api, gateway_of(stack, url), key, folder, publication, wait_s)


@app.command(rich_help_panel="Objects")
@on_stack
def get(
    stack: "StackClient",
    kind: Annotated[
        str,
        typer.Argument(
            help="loraadapters (lora), servingpools (spool), apikeys (wkey), runners.", autocompletion=kinds
        ),
    ],
    name: Annotated[str | None, typer.Argument(show_default=False, autocompletion=names_of)] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="The namespace to look in.",
            show_default="default, or the context's; of runners: all",
        ),
    ] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Look in every namespace.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="table, wide, json or yaml.")] = "table",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on printing what changes.")] = False,
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """List objects: `weft get lora -A`, `weft get spool base -o yaml`, `weft get runners`."""
    from weft_cli.objects import get as run
    from weft_cli.objects import get_runners

    if output not in ("table", "wide", "json", "yaml"):
        raise BadInput(f"there is no output {output!r}", "there are: table, wide, json, yaml")
    resource = plural(kind)
    if resource == "runners":
        if watch:
            raise BadInput("runners are no objects and cannot be watched", "use `weft get runners` again")
        return get_runners(stack.supervisor(address, tls_dir), name, None if all_namespaces else namespace, output)
    filter_namespace = None if all_namespaces else stack.namespace(namespace)
    return run(stack.api, resource, name, filter_namespace, output, watch=watch)


@app.command(rich_help_panel="Objects")
@on_stack
def describe(
    stack: "StackClient",
    kind: Annotated[
        str,
        typer.Argument(help="loraadapter (lora), servingpool (spool), apikey (wkey), runner.", autocompletion=kinds),
    ],
    name: Annotated[str, typer.Argument(autocompletion=names_of)],
    namespace: Namespace = None,
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Show everything about one object: conditions, remedies, runners and tiers."""
    from weft_cli.objects import describe as run

    run(stack.api, lambda: stack.supervisor(address, tls_dir), plural(kind), name, stack.namespace(namespace))


@app.command(rich_help_panel="Objects")
@on_stack
def delete(
    stack: "StackClient",
    kind: Annotated[str | None, typer.Argument(show_default=False, autocompletion=kinds)] = None,
    names: Annotated[list[str] | None, typer.Argument(show_default=False, autocompletion=names_of)] = None,
    files: Files = None,
    namespace: Namespace = None,
) -> None:
    """Delete objects: `weft delete lora upper -n acme`, `weft delete -f adapter.yaml` (`-f -`: standard input)."""
    from weft_cli.objects import OTHER_NAMESPACE, named, to_delete
    from weft_cli.objects import delete as run

    if bool(files) == bool(kind):
        raise BadInput("what to delete?", "either KIND NAME..., or -f MANIFEST")
    if kind and not names:
        raise BadInput(f"which {kind}?", "name one or more")
    resource = plural(kind) if kind else ""
    if resource == "runners":
        raise BadInput("runners are not deleted: their pool wants them", "change spec.replicas of the pool")
    if files:
        return run(stack.api, to_delete(files))
    return run(stack.api, named(resource, stack.namespace(namespace), names or ()), OTHER_NAMESPACE)


@app.command(
    rich_help_panel="Tools",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def predictor(context: typer.Context) -> int:
    """Train the length predictor: `weft predictor train DATA --out FILE [--kind encoder]`; more with `--help`."""
    words = context.args
    if words[:1] != ["train"] and not {"-h", "--help"} & set(words):
        raise BadInput("what should the predictor do?", "weft predictor train DATA [--out FILE]")
    try:
        from weft_predictor_train.training import main as run
    except ImportError as error:
        raise CommandError(
            f"the predictor's training is not installed: {error}", "pip install 'weft[training]'"
        ) from error
    return run(words[1:] if words[:1] == ["train"] else words)


@app.command(rich_help_panel="Tools")
def families(
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="wide: also architectures, ropes, what differs.")
    ] = None,
) -> None:
    """List the served families of base models, and the modules that adapters may change.

    - `weft families`  names of models, modules of adapters, sizes that were tried; and what is exact to what

    - `weft families -o wide`  also the architectures of config.json, kinds of rope, what a family computes otherwise
    """
    from weft.domain.model import family_table
    from weft_cli.output import say, table

    if output not in (None, "wide"):
        raise BadInput(f"expected -o wide, got {output}", "weft families --help")
    wide = output == "wide"
    for line in table(family_table.HEADERS + (family_table.MORE_HEADERS if wide else ()), family_table.rows(wide=wide)):
        say(line)
    say(f"\n{family_table.EXACT}")


@app.command(rich_help_panel="Tools")
def sim(
    trace: Annotated[
        Path | None, typer.Argument(help="A trace file: .csv or .jsonl, .gz too.", show_default=False)
    ] = None,
    pool: Annotated[Path | None, typer.Option(help="A pool's description (TOML).", show_default=False)] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the description; may be given again.")
    ] = None,
    speed: Annotated[float, typer.Option(min=1e-6, help="Arrivals come this many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace: chrome://tracing, ui.perfetto.dev.", show_default=False)
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a pool's description with every default.")] = False,
) -> None:
    """Run a trace on a pool that is only described: TTFT, time per token, end to end, utilization.

    Gateway, scheduler, supervisor and runners are the code that ships, on a virtual clock; the model's time comes from
    the figures that a runner measures of itself at start (`weft get runners -o yaml`).

    - `weft sim --example > pool.toml`  what can be described

    - `weft sim trace.csv --pool pool.toml`  a trace on that pool

    - `weft sim trace.csv --pool pool.toml --set runners=8 --speed 2`  twice the load on eight runners

    A trace has columns for the arrival (arrival_s, TIMESTAMP, arrival_timestamp, timestamp), the prompt's tokens
    (prompt_tokens, ContextTokens, prompt_size, input_length) and the answer's (output_tokens, GeneratedTokens,
    token_size, output_length), and may have others: the adapter (adapter, model), what the client asks for (max_tokens)
    and what the predictor answers (p10_tokens, p50_tokens, p90_tokens, p99_tokens, bucket_tokens). The public traces of
    Azure, Splitwise and Mooncake are read as they are.
    """
    from weft_cli.sim import run

    run(trace, pool, changes or [], speed=speed, seed=seed, timeline=timeline, example=example)


@app.command(rich_help_panel="Tools")
@on_stack
def conformance(
    stack: "StackClient",
    url: Annotated[
        str | None, typer.Argument(help="The server, as http://HOST:PORT. Default: this machine's stack.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The base model.", show_default="by /v1/models")] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", help="NAME, or NAME={...}: what its requests hold beside the name; may be given again."
        ),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(help="A shell command that replaces the first adapter's content, and ends when it is served."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    key: Key = None,
) -> int:
    """Check the promises of a LoRA server: Weft, vLLM or any server with OpenAI's completions.

    - `weft conformance`  this machine's stack

    - `weft conformance http://HOST:8000 --base m --adapter a --adapter b`  another server

    - `weft conformance http://HOST:8080 --base m --adapter 'a={"lora": [{"id": 0, "scale": 1}]}' ...`  llama.cpp

    - `weft conformance --adapter acme/upper ... --update "weft push upper out/ -n acme"`  with an update in flight

    The server is compared with itself: greedy answers under load with those of each model alone. It should have nothing
    else to do; the checks send some hundred requests. Exit code 1 when a check fails.
    """
    try:
        from weft_conformance.command import run
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "weft_conformance":
            raise _not_installed("conformance") from error
        raise

    return run(gateway_of(stack, url), key, base, adapters or [], update, as_json=as_json)


def _existing(folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir():
        raise BadInput(f"--file-root: {folder} is not a folder")
    return folder.resolve() if folder else None


@cache
def _commands(*, with_bench: bool) -> Callable[..., Any]:
    """Parse and run: made once, since typer itself would build every command and option again at each call."""
    if with_bench:
        _add_bench()
    return get_command(app)


def _add_bench() -> None:
    """`weft bench`, where it is installed."""
    from importlib.util import find_spec

    if find_spec("weft_bench") is None or find_spec("weft_bench.main") is None:
        anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(name="bench", rich_help_panel="Tools", context_settings=anything)(_refuse_bench)
        return
    from weft_bench.main import app as bench_app

    app.add_typer(bench_app, name="bench", rich_help_panel="Tools")


def _refuse_bench() -> int:
    """Benchmarks, which are not installed (`pip install 'weft[bench]'`)."""
    raise _not_installed("bench")


def _not_installed(name: str) -> CommandError:
    return CommandError(
        f"weft {name} is a distribution of its own, which is not installed", f"pip install 'weft[{name}]'"
    )


def _usage(error: Exception) -> int | None:
    """Print click's errors: faults of the command line."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        return None
    with contextlib.suppress(BrokenPipeError):
        show()
    return USAGE


def _failed(error: CommandError) -> int:
    from weft_cli.output import note

    with contextlib.suppress(BrokenPipeError):
        for line in error.message.splitlines() or [""]:
            note(f"weft: {line}")
        if error.hint:
            note(f"      {error.hint}")
    return error.exit_code


def _flush(stream: TextIO) -> None:
    """What nobody reads any more goes to nowhere: the interpreter's last flush would fail of it, with exit code 120."""
    try:
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
