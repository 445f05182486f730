"""`weft key create | revoke | list`: the command line of `keys.py`."""

from typing import TYPE_CHECKING, Annotated

import typer

from weft_cli.options import SupervisorAt, TlsDir, on_stack

if TYPE_CHECKING:
    from weft_cli.stack import StackClient

key_app = typer.Typer(no_args_is_help=True, help="API keys: who may call which namespace's models.")


@key_app.command("create")
@on_stack
def key_create(
    stack: "StackClient",
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Namespace whose models the key may call; not with scope platform.")
    ] = "",
    scope: Annotated[
        str,
        typer.Option(
            help="inference; read-only (lists, metrics; no prompts); metrics; platform (metrics of every namespace)."
        ),
    ] = "inference",
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Only this model, or pattern ('acme/*'); may be given again.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Refuse it after this time: 12h, 30d, 4w.", show_default="never")
    ] = None,
    note: Annotated[str, typer.Option(help="For people: whose key it is.")] = "",
    output: Annotated[str, typer.Option("--output", "-o", help="key, or secret: a Kubernetes Secret of it.")] = "key",
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Make a key; it is printed once.

    - `KEY=$(weft key create -n acme --expires 30d)`

    - `weft key create -n acme --model 'acme/support-*'`  for some models

    - `weft key create --scope platform`  for Prometheus: metrics of every namespace, no model

    - `weft key create -n acme -o secret | kubectl apply -f -`  for pods of that namespace
    """
    from weft_cli.keys import CreatedKey, create

    new = CreatedKey(namespace, note, scope, models or (), expires)
    create(stack.supervisor(address, tls_dir), new, output)


@key_app.command("revoke")
@on_stack
def key_revoke(
    stack: "StackClient",
    key_id: Annotated[str, typer.Argument(help="The key's id, as `weft key list` shows it.")],
    address: SupervisorAt = None,
    tls_dir: TlsDir = None,
) -> None:
    """Revoke a key: gateways refuse it within moments, while they and the scheduler are connected."""
    from weft_cli.keys import revoke

    revoke(stack.supervisor(address, tls_dir), key_id)


@key_app.command("list")
@on_stack
def key_list(stack: "StackClient", address: SupervisorAt = None, tls_dir: TlsDir = None) -> None:
    """List every key by its id, never the key itself."""
    from weft_cli.keys import list_keys

    list_keys(stack.supervisor(address, tls_dir))
