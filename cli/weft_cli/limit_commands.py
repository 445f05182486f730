"""`weft limit set | list | delete` and `weft usage`: the command line of `limits.py`."""

from typing import TYPE_CHECKING, Annotated

import typer

from weft_cli.options import SupervisorAt, TlsDir, on_stack

if TYPE_CHECKING:
    from weft_cli.stack import StackClient

limit_app = typer.Typer(no_args_is_help=True, help="Limits of namespaces and keys: requests, tokens, concurrency.")
Whose = Annotated[
    str | None, typer.Option("--namespace", "-n", help="All keys of this namespace together.", show_default=False)
]
OfKey = Annotated[
    str | None, typer.Option("--key", help="This key alone, by its id (`weft key list`).", show_default=False)
]
Model = Annotated[
    str, typer.Option(help="For this model, or pattern ('acme/chat-*'), together.", show_default="every model")
]


@limit_app.command("set")
@on_stack
def limit_set(
    stack: "StackClient",
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LIMIT=NUMBER",
            help="requests-per-minute, tokens-per-minute, concurrent (requests at a time), tokens-per-day.",
            show_default=False,
        ),
    ] = None,
    namespace: Whose = None,
    key: OfKey = None,
    model: Model = "",
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Set the limits of a namespace or a key, in place of those before.

    - `weft limit set -n acme requests-per-minute=600 tokens-per-minute=100000`

    - `weft limit set -n acme --model acme/support concurrent=8`  one adapter, for all keys

    - `weft limit set --key 1a2b3c4d requests-per-minute=60`

    - `weft limit set -n acme tokens-per-day=5000000`  a quota; the day is UTC's
    """
    from weft_cli.limits import limits_of, set_limit, subject_of

    subject, values = subject_of(namespace, key), limits_of(limits or [])
    set_limit(stack.supervisor(address, tls_dir), subject, model, values)


@limit_app.command("delete")
@on_stack
def limit_delete(
    stack: "StackClient",
    namespace: Whose = None,
    key: OfKey = None,
    model: Model = "",
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Delete the limits of a namespace or a key, for that model."""
    from weft_cli.limits import set_limit, subject_of

    set_limit(stack.supervisor(address, tls_dir), subject_of(namespace, key), model, {})


@limit_app.command("list")
@on_stack
def limit_list(stack: "StackClient", address: SupervisorAt = None, tls_dir: TlsDir = None) -> None:
    """List every limit, and the quotas used up today."""
    from weft_cli.limits import list_limits

    list_limits(stack.supervisor(address, tls_dir))


@on_stack
def usage(
    stack: "StackClient",
    since: Annotated[str, typer.Option(help="A number of days (7d), or the first day (2026-11-01); UTC.")] = "30d",
    by: Annotated[
        str, typer.Option(help="Sum by: day, namespace, model, key; several with commas.")
    ] = "namespace,model",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Usage of this namespace alone.", show_default="all")
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, for a spreadsheet or a bill.")] = False,
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Show the requests and tokens of namespaces: `weft usage --since 7d --by day,namespace --csv`."""
    from weft_cli.limits import usage as run

    run(stack.supervisor(address, tls_dir), since, by, namespace, as_csv=as_csv)
