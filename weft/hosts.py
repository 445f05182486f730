"""Host names that a server without authentication answers to.

A page can point its name at an address of this machine or network once it is loaded (DNS rebinding). The browser then
takes this server for the page's origin, and sends the page's name as `Host`. Nobody can point an address or `localhost`
elsewhere.
"""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

ANY = "*"
MAX_HOST_CHARS = 300  # a name has 253, a port 5
_V4, _V6 = r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}\.?", r"\[[0-9a-f:.]+(?:%[a-z0-9._~-]+)?\]"  # no name looks like these
_HOST = re.compile(rf"(?:{_V4}|{_V6}|(?P<name>[a-z0-9._-]*))(?::[0-9]*)?")
_ENTRY = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?")


class AllowedHosts:
    """Accepts a `Host` that is an address, `localhost`, a name below it, or one of `names`."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Take names from `host_name`: NAME, *.DOMAIN for each name below a domain, * for every name."""
        listed = frozenset(names)
        self._allows_all, self._names = ANY in listed, listed | {"localhost", ""}
        self._endings = (".localhost", *(name.removeprefix("*") for name in listed if name.startswith("*.")))

    def allows(self, host: bytes) -> bool:
        """Return whether a request with this `Host` is answered; an empty `Host` names nobody."""
        parts = _HOST.fullmatch(host.decode("latin-1").strip(" \t").lower()) if len(host) <= MAX_HOST_CHARS else None
        if self._allows_all or parts is None:
            return self._allows_all
        if (name := parts["name"]) is None:
            return True
        name = name.removesuffix(".")
        return name in self._names or name.endswith(self._endings)


class HostCheck:
    """ASGI middleware: a request with another `Host` goes to the application that `refuse(scope, host)` returns."""

    def __init__(self, app: Any, hosts: AllowedHosts, refuse: Callable[[Any, str], Callable[..., Awaitable[None]]]):
        self._app, self._hosts, self._refuse = app, hosts, refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._hosts.allows(value):
                    return await self._refuse(scope, value.decode("latin-1"))(scope, receive, send)
        return await self._app(scope, receive, send)


def refusal(host: str) -> str:
    """Return the text of a 403: the expected names, the given one, and the flag."""
    return (
        f"Host: expected an address, localhost or a name of --allowed-hosts, since this server asks for no key, "
        f"got {host[:MAX_HOST_CHARS]!r}. If the name is yours, start the server with --allowed-hosts and that name."
    )


def host_name(text: str) -> str:
    """Return an entry of --allowed-hosts in lower case. Raises ValueError."""
    name = text.strip().lower()
    if name != ANY and not _ENTRY.fullmatch(name):
        raise ValueError(f"expected NAME, *.DOMAIN or *, without scheme, port and path, got {text[:80]!r}")
    return name.removesuffix(".")
