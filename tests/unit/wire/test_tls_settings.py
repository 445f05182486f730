"""With certificates there is no way around them: a depot over plain HTTP is a wrong setting, told at the start."""

from pathlib import Path
from typing import Any

import httpx2
import pytest

from weft_gateway.settings import GatewaySettings
from weft_operator.controller import DepotClient
from weft_operator.errors import DepotFailed, DepotUnavailable
from weft_runner.settings import parse_settings

RUNNER = (
    *("--listen", "127.0.0.1:1", "--probes", "127.0.0.1:2", "--supervisor", "127.0.0.1:3", "--data-dir", "/d"),
    *("--pool", "ns/pool", "--base-digest", f"sha256:{'0' * 64}"),
)


@pytest.mark.parametrize(
    ("parse", "flags"),
    [
        (GatewaySettings.parse, ("--depot", "http://depot:1")),
        (GatewaySettings.parse, ()),
        (parse_settings, (*RUNNER, "--depot", "http://depot:1")),
    ],
)
def test_with_certificates_no_plain_depot_is_taken(
    parse: Any, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as told:
        parse(["--tls-dir", str(tmp_path), *flags])
    assert told.value.code == 2
    assert "with --tls-dir the depot is spoken to over https://" in capsys.readouterr().err


def test_both_take_a_secured_one_and_a_plain_one_without_certificates(tmp_path: Path) -> None:
    tls = ("--tls-dir", str(tmp_path))
    assert GatewaySettings.parse([*tls, "--depot", "https://depot:1"]).tls_dir == tmp_path
    assert parse_settings([*RUNNER, *tls, "--depot", "https://depot:1"]).tls_dir == tmp_path
    assert parse_settings([*RUNNER, "--depot", "http://depot:1"]).tls_dir is None


@pytest.mark.parametrize("status", [401, 403])
async def test_a_depot_that_refuses_our_certificate_says_nothing_of_the_adapter(status: int) -> None:
    """The object is not Failed for it: the depot counts as away until the certificate is right."""
    client = DepotClient("http://depot")
    await client._http.aclose()
    body = {"reason": "PermissionDenied", "message": "the caller's certificate is of runner"}
    client._http = httpx2.AsyncClient(
        base_url="http://depot", transport=httpx2.MockTransport(lambda _: httpx2.Response(status, json=body))
    )
    with pytest.raises(DepotUnavailable, match="certificate is of runner") as told:
        await client.retain(frozenset())
    assert not isinstance(told.value, DepotFailed)
    await client.aclose()
