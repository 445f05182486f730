"""`weft batch run | wait | list | get | cancel`: the command line of `batch.py`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft_cli.errors import BadInput
from weft_cli.options import GatewayUrl, Key, gateway_of, on_stack

if TYPE_CHECKING:
    from weft_cli.stack import StackClient

Output = Annotated[
    Path, typer.Option("--output", "-o", help="File for the answers, a line each; those of failed lines go beside it.")
]
BatchId = Annotated[str, typer.Argument(help="The batch's id, as `weft batch list` shows it.")]

batch_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Many requests from a file, answered in room that interactive requests leave (OpenAI's Batch API).

    A line of the file is one request, to any model that your key may use:

    `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "acme/upper",
    "messages": [{"role": "user", "content": "hello"}]}}`
    """,
)


@batch_app.command("run")
@on_stack
def batch_run(
    stack: "StackClient",
    file: Annotated[Path, typer.Argument(help="JSON lines, as OpenAI's Batch API takes them.")],
    output: Output,
    delete_files: Annotated[
        bool, typer.Option("--delete-files", help="Delete the batch's files from the gateway once they are here.")
    ] = False,
    url: GatewayUrl = None,
    key: Key = None,
) -> int:
    """Answer every line of a file. Ctrl-C leaves the batch running.

    - `weft batch run in.jsonl -o out.jsonl`  answers in out.jsonl, failed lines in out.errors.jsonl

    - `weft batch wait BATCH -o out.jsonl`  after Ctrl-C, or from another machine

    - `weft batch run in.jsonl -o out.jsonl --url https://weft.example.com --key KEY`  a stack elsewhere

    Exit codes: 0 every line is answered, 1 some failed, 2 the command line or the file is wrong, 130 Ctrl-C.
    """
    from weft_cli.batch import BatchApiClient

    with BatchApiClient(gateway_of(stack, url), key) as batches:
        return batches.run(file, output, delete_files=delete_files)


@batch_app.command("wait")
@on_stack
def batch_wait(
    stack: "StackClient",
    batch: BatchId,
    output: Output,
    delete_files: Annotated[
        bool, typer.Option("--delete-files", help="Delete the batch's files from the gateway once they are here.")
    ] = False,
    url: GatewayUrl = None,
    key: Key = None,
) -> int:
    """Wait for a batch and fetch its answers: `weft batch wait BATCH -o out.jsonl`. Exit codes as of `run`."""
    from weft_cli.batch import BatchApiClient

    with BatchApiClient(gateway_of(stack, url), key) as batches:
        return batches.wait(batch, output, delete_files=delete_files)


@batch_app.command("list")
@on_stack
def batch_list(stack: "StackClient", url: GatewayUrl = None, key: Key = None) -> None:
    """List your newest 100 batches, the newest first."""
    from weft_cli.batch import BatchApiClient

    with BatchApiClient(gateway_of(stack, url), key) as batches:
        batches.list()


@batch_app.command("get")
@on_stack
def batch_get(
    stack: "StackClient",
    batch: BatchId,
    output: Annotated[str, typer.Option("--output", "-o", help="json or yaml.")] = "yaml",
    url: GatewayUrl = None,
    key: Key = None,
) -> None:
    """Show everything about one batch, as returned by the API."""
    from weft_cli.batch import BatchApiClient

    if output not in ("json", "yaml"):
        raise BadInput(f"there is no output {output!r}", "there are: json, yaml")
    with BatchApiClient(gateway_of(stack, url), key) as batches:
        batches.show(batch, output)


@batch_app.command("cancel")
@on_stack
def batch_cancel(stack: "StackClient", batch: BatchId, url: GatewayUrl = None, key: Key = None) -> None:
    """End a batch; lines that are answered stay, `weft batch wait BATCH -o out.jsonl` fetches them."""
    from weft_cli.batch import BatchApiClient

    with BatchApiClient(gateway_of(stack, url), key) as batches:
        batches.cancel(batch)
