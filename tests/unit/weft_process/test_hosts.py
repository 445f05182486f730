"""Values of `Host` that a server without authentication answers."""

from typing import Any

import pytest

from weft.hosts import AllowedHosts, HostCheck, host_name

NAMES = tuple(host_name(name) for name in ("gpu-box", "Weft.Example.com.", "*.inner.example"))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "0.0.0.0:8000", "203.0.113.9", "[::1]", "[::1]:8000",
        "[fd00:ec2::254]:80", "[::ffff:127.0.0.1]:1", "[fe80::1%eth0]", "localhost", "LOCALHOST:8000", "localhost.",
        "app.localhost:3000", "gpu-box", "GPU-box:8000", "weft.example.com", "weft.example.com.:443", "a.inner.example",
        "a.b.inner.example:80", "", "localhost \t", ":8000",
    ],
)  # fmt: skip
def test_addresses_localhost_and_given_names_are_answered(host: str) -> None:
    assert AllowedHosts(NAMES).allows(host.encode())


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "127.0.0.1.nip.io:8000",
        "notlocalhost", "xlocalhost:80", "localhost:80:80", "localhost@evil.example", "evil.example@localhost",
        "evil.example#localhost", "evil.example/.localhost", "evil.example, localhost", "localhost evil.example",
        "gpu-box.evil.example", "inner.example", "xinner.example", "[evil.example]", "[::1].evil.example", "[::1",
        "::1", "127.1", "0x7f.0.0.1", "127.0.0.0001", "2130706433", "1.2.3.4.5", "localhost:http",
        "*", "*.inner.example.evil",
        "l\xf6calhost", "a" * 1000 + ".localhost", "evil.example\x00.localhost", "\u200blocalhost",
    ],
)  # fmt: skip
def test_any_other_name_is_not(host: str) -> None:
    assert not AllowedHosts(NAMES).allows(host.encode())
    assert AllowedHosts(("*",)).allows(host.encode())


def test_without_names_only_addresses_and_localhost_are_answered() -> None:
    assert [AllowedHosts().allows(host) for host in (b"gpu-box", b"localhost", b"::", b"[::]")] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "text", ["http://gpu-box", "gpu-box:8000", "gpu-box/v1", "[::1]", "", "*.", "a..b", "*a", "b\xfc"]
)
def test_what_is_no_name_is_refused_with_the_form_that_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected NAME, \*\.DOMAIN or \*, .*, got"):
        host_name(text)


async def test_one_host_of_two_that_is_not_allowed_refuses_the_request() -> None:
    seen = list[str]()

    def application(name: str) -> Any:
        async def answer(*_: object) -> None:
            seen.append(name)

        return answer

    check = HostCheck(application("inner"), AllowedHosts(), lambda _, host: application(host))
    for hosts in ((b"localhost",), (b"localhost", b"evil.example"), ()):
        await check({"type": "http", "headers": [(b"host", host) for host in hosts]}, None, None)
    await check({"type": "lifespan"}, None, None)
    assert seen == ["inner", "evil.example", "inner", "inner"]
