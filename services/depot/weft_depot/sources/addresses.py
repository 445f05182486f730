"""Addresses that the depot never connects to: the cloud's metadata service, the host itself, the network inside.

A name is resolved before each request, and once more for each connection, which goes to the checked address: a name
may change between the two. Flags (`--hf-endpoint`, `--s3-endpoints`) and redirects of their hosts decide the target of
a request, never a tenant. This is a second wall.
"""

import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

from weft.artifacts.errors import Reason, Refused
from weft.domain.text import quoted

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            "169.254.169.254", "fd00:ec2::254", "fd00:ec2::23",  # AWS, and most other clouds; pod identity of EKS
            "fd20:ce::254", "168.63.129.16", "100.100.100.200", "192.0.0.192",  # Google, Azure, Alibaba, Oracle
        ),
    )
)  # fmt: skip
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")  # ::1 and :: are no forms of IPv4
_PORTS = {"http": 80, "https": 443}


def check_address(url: str, *, inside: bool, subject: str) -> None:
    """Refuse a URL whose host is link-local, metadata or no host address; private and loopback unless `inside`.

    A name that is not found passes: a proxy may know it, and the connection fails otherwise.
    Raises Refused(EndpointNotAllowed).
    """
    parts = split_url(url, subject)
    assert parts.hostname
    checked_addresses(parts.hostname, parts.port or _PORTS[parts.scheme], inside=inside, subject=subject)


def checked_addresses(host: str, port: int, *, inside: bool, subject: str) -> list[str]:
    """Resolve a name and return its addresses for a connection, none if the name is unknown.

    Raises Refused(EndpointNotAllowed) if one of the addresses is refused by the rules of `check_address`.
    """
    addresses = addresses_of(host, port)
    for address in addresses:
        if reason := _refusal(address, inside):
            raise Refused(
                Reason.ENDPOINT_NOT_ALLOWED, f"{subject} {quoted(host, 200)} is {address}, {reason}: not connected"
            )
    return [str(address) for address in addresses]


def is_inside(url: str) -> bool:
    """Whether a host that a flag names is in a private network or on this machine."""
    parts = urlsplit(url)
    addresses = addresses_of(parts.hostname or "", parts.port or 443)
    return any(address.is_private for address in addresses)


def split_url(url: str, subject: str) -> SplitResult:
    """Split an http(s) URL with a host and nothing that hides one. Raises Refused(EndpointNotAllowed)."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, usable = SplitResult("", "", "", "", ""), False
    if not usable or parts.username is not None or parts.password is not None or not url.isprintable():
        raise Refused(Reason.ENDPOINT_NOT_ALLOWED, f"{subject} {quoted(url, 200)} is not http(s)://HOST[:PORT]")
    return parts


def addresses_of(host: str, port: int) -> list[Address]:
    """Resolve a name now; empty when it is unknown here."""
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in results]


def _refusal(address: Address, inside: bool) -> str:
    form = _ipv4_of(address) or address
    if form in _METADATA:
        return "a metadata service"
    if form.is_link_local or form.is_multicast or form.is_unspecified:
        return "no address of a server"
    return "an address inside" if not inside and not form.is_global else ""


def _ipv4_of(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which a gateway or the kernel may translate an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
