"""A gateway as commands speak to it: over HTTP as any OpenAI client, with errors that say what to do."""

import contextlib
from collections.abc import Generator

import httpx2

from weft_cli.errors import BadInput, CommandError
from weft_cli.sse import refusal_of

CONNECT_S = 5.0
SILENCE_S = 3600.0  # a pool may hold a request so long until it has a runner; then the gateway pings
KEY_HINT = "give one with --key or $WEFT_API_KEY; `weft key create --namespace NAME` makes one"


class GatewayGone(CommandError):
    """No gateway answers, or it went away: another try may find it."""


def gateway_client(url: str, key: str | None) -> httpx2.Client:
    """Make a client of the gateway at `url`, which is without `/v1`. Raises BadInput."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx2.Timeout(SILENCE_S, connect=CONNECT_S)
    try:
        return httpx2.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
    except (httpx2.InvalidURL, UnicodeEncodeError) as error:
        raise BadInput(f"--url or --key: {error}") from error


@contextlib.contextmanager
def link_errors(url: str) -> Generator[None]:
    """Explain a failing connection in one line. Raises BadInput, GatewayGone."""
    try:
        yield
    except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise BadInput(f"--url: {url!r} is no URL of a gateway: {error}") from error
    except httpx2.ConnectError as error:
        raise GatewayGone(f"no gateway answers at {url}: {error}", "`weft status` shows this stack's") from error
    except httpx2.HTTPError as error:
        raise GatewayGone(f"the server at {url} went away: {str(error) or type(error).__name__}") from error


def refusal_error(body: bytes, status: int, absent_hint: str) -> CommandError:
    """Make the error of a refusal. `absent_hint`: the remedy for a missing object."""
    message = refusal_of(body, status)
    match status:
        case 401:
            return CommandError(message, KEY_HINT)
        case 404:
            return CommandError(message, absent_hint)
        case 400 | 413:
            return BadInput(message)
        case 502 | 503 | 504:
            return GatewayGone(message)
        case _:
            return CommandError(message)
