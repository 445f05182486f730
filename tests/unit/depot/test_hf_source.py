"""`hf:` against a hub on this machine that goes wrong in every way hubs do."""

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.fake_hub import FakeHub
from harness.waiting import PATIENCE_S
from tests.unit.artifacts.making import write_adapter
from tests.unit.depot.reading import Asked, asked, everything, folder_bytes, quick_policy, read_all, refusal
from weft.artifacts.errors import Reason, Refused, Unavailable
from weft_depot.credentials import Secret
from weft_depot.sources import HfSource, Hub, parse_revision, source_of

TOKEN = "hf_SecretTokenOfTenantA"
BIG = bytes(range(256)) * 4096 * 3  # 3 MiB: four ranges
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as fake:
        yield fake


def source(hub: FakeHub, **changed: float) -> HfSource:
    policy = quick_policy(**changed)
    return HfSource(Hub(hub.url, policy), policy)


def at(path: str, revision: str | None = None, token: str | None = None) -> Asked:
    secret = Secret("team/hub", {"token": token.encode()}) if token else None
    return asked(f"hf:{path}", secret, revision=revision)


def test_the_fake_hub_is_one_that_the_real_library_downloads_from(hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import HfApi, hf_hub_download  # here: the real client is slow to import

    files = folder_bytes(write_adapter(tmp_path / "a"), "deep/")
    repo = hub.repo("org/lora", files, tokens=frozenset((TOKEN,)))
    info = HfApi(endpoint=hub.url, token=TOKEN).model_info("org/lora", files_metadata=True)
    assert info.sha == repo.refs["main"]
    assert {s.rfilename: s.size for s in info.siblings or []} == {name: len(data) for name, data in files.items()}
    for name, data in files.items():
        folder, _, plain = name.rpartition("/")
        got = hf_hub_download(
            "org/lora", plain, subfolder=folder, endpoint=hub.url, token=TOKEN, cache_dir=tmp_path / "cache"
        )
        assert Path(got).read_bytes() == data


def test_a_folder_of_a_repository_is_read_at_one_commit(hub: FakeHub) -> None:
    hub.repo("org/lora", {"README.md": b"x", "v1/config.json": b"{}", "v1/w.safetensors": BIG, "v1/deeper/a.json": b""})
    assert read_all(source(hub), at("org/lora/v1")) == {"config.json": b"{}", "w.safetensors": BIG}
    assert set(read_all(source(hub), at("org/lora"))) == {"README.md"}


def test_a_revision_is_a_branch_or_a_commit_and_is_resolved_once(hub: FakeHub) -> None:
    repo = hub.repo("org/lora", {"config.json": b"old"})
    old = repo.refs["main"]
    repo.commit({"config.json": b"pull"}, "refs/pr/1")
    with source(hub).open(*at("org/lora"), everything) as snapshot:
        new = repo.commit({"config.json": b"new!"})
        with snapshot.open("config.json") as file:
            assert file.read() == b"old", "a branch that moves meanwhile changes nothing"
        assert snapshot.unchanged()
    assert read_all(source(hub), at("org/lora")) == {"config.json": b"new!"}
    assert read_all(source(hub), at("org/lora", new)) == {"config.json": b"new!"}
    assert read_all(source(hub), at("org/lora", old)) == {"config.json": b"old"}
    assert read_all(source(hub), at("org/lora", "refs/pr/1")) == {"config.json": b"pull"}


def test_the_signature_follows_the_files_that_matter_and_not_the_rest(hub: FakeHub) -> None:
    def signature() -> str | None:
        with source(hub).open(*at("org/lora"), lambda name: name != "README.md") as snapshot:
            return snapshot.signature

    repo = hub.repo("org/lora", {"README.md": b"1", WEIGHTS: b"abc"})
    first = signature()
    repo.commit({"README.md": b"2", WEIGHTS: b"abc"})
    assert signature() == first
    repo.commit({"README.md": b"2", WEIGHTS: b"abd"})
    assert signature() != first


def test_a_header_costs_kilobytes_and_a_whole_file_few_requests(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG * 4})
    with source(hub).open(*at("org/lora"), everything) as snapshot:
        with snapshot.open(WEIGHTS) as file:
            assert file.read(8) == BIG[:8]
        assert hub.bytes_asked(WEIGHTS) <= 64 << 10
        with snapshot.open(WEIGHTS) as file:
            assert file.read() == BIG * 4
    assert len([seen for seen in hub.seen if seen.server == "storage"]) <= 6


def test_the_hub_promises_the_sha256_of_large_files(hub: FakeHub) -> None:
    hub.repo("org/lora", {"config.json": b"{}", WEIGHTS: BIG})
    with source(hub).open(*at("org/lora"), everything) as snapshot:
        assert dict(snapshot.expected_sha256) == {WEIGHTS: hashlib.sha256(BIG).hexdigest()}


def test_the_token_goes_to_the_hub_and_never_to_where_it_redirects(hub: FakeHub) -> None:
    hub.repo("org/private", {"config.json": b"{}", WEIGHTS: BIG}, tokens=frozenset((TOKEN,)))
    assert read_all(source(hub), at("org/private", token=f"  {TOKEN}\n"))[WEIGHTS] == BIG
    assert {seen.token for seen in hub.seen if seen.server == "hub"} == {TOKEN}
    assert {seen.token for seen in hub.seen if seen.server == "storage"} == {None}


def test_a_session_that_a_hub_opens_for_one_tenant_is_not_carried_to_the_next(hub: FakeHub) -> None:
    hub.repo("org/private", {"config.json": b"{}"}, tokens=frozenset((TOKEN,)))
    shared = source(hub)  # as in a process: one client for everybody
    hub.fault("hub:/api", status=503, headers={"set-cookie": "session=of-the-first; Path=/"})
    assert read_all(shared, at("org/private", token=TOKEN))
    assert refusal(shared, at("org/private")).reason == Reason.SOURCE_NOT_FOUND
    assert {seen.cookie for seen in hub.seen} == {None}


@pytest.mark.parametrize(
    ("fields", "token", "reason", "says"),
    [
        ({"tokens": frozenset((TOKEN,))}, None, Reason.SOURCE_NOT_FOUND, "credentialsRef"),
        ({"tokens": frozenset((TOKEN,))}, "hf_other", Reason.SOURCE_NOT_FOUND, "token that may read it"),
        ({"tokens": frozenset((TOKEN,)), "gated": True}, None, Reason.SOURCE_FORBIDDEN, "accept its terms"),
        ({"tokens": frozenset((TOKEN,)), "gated": True}, "hf_other", Reason.SOURCE_FORBIDDEN, "accept its terms"),
    ],
)
def test_who_may_not_read_a_repository_is_told_what_to_do(
    hub: FakeHub, fields: dict[str, Any], token: str | None, reason: Reason, says: str
) -> None:
    hub.repo("org/private", {"config.json": b"{}"}, **fields)
    error = refusal(source(hub), at("org/private", token=token))
    assert error.reason == reason
    assert says in error.message
    assert "org/private" in error.message
    assert "hf_" not in error.message


@pytest.mark.parametrize(
    ("path", "revision", "says"),
    [
        ("org/none", None, "does not exist"),
        ("org/lora", "v9", "revision"),
        ("org/lora", "0" * 40, "revision"),
        ("org/lora/none", None, "folder"),
    ],
)
def test_what_is_not_there_is_not_found(hub: FakeHub, path: str, revision: str | None, says: str) -> None:
    hub.repo("org/lora", {"v1/config.json": b"{}"})
    error = refusal(source(hub), at(path, revision))
    assert error.reason == Reason.SOURCE_NOT_FOUND
    assert says in error.message


@pytest.mark.parametrize(
    ("status", "headers", "kind", "reason", "says"),
    [
        (400, {}, Refused, Reason.SOURCE_NOT_FOUND, "400"),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            Refused,
            Reason.SOURCE_FORBIDDEN,
            "401",
        ),
        (403, {}, Refused, Reason.SOURCE_FORBIDDEN, "403"),
        (429, {"Retry-After": "86400"}, Unavailable, Reason.SOURCE_UNREACHABLE, "another 86400 s"),
        (
            429,
            {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'},
            Unavailable,
            Reason.SOURCE_UNREACHABLE,
            "another 55 s",
        ),
        (500, {}, Unavailable, Reason.SOURCE_UNREACHABLE, "500"),
        (503, {"Retry-After": "x"}, Unavailable, Reason.SOURCE_UNREACHABLE, "503"),
    ],
)
def test_what_the_hub_answers_has_its_reason(
    hub: FakeHub, status: int, headers: dict[str, str], kind: type, reason: Reason, says: str
) -> None:
    hub.repo("org/lora", {"config.json": b"{}"})
    hub.fault("/api/models", times=10, status=status, headers=headers)
    error = refusal(source(hub), at("org/lora", token=TOKEN))
    assert (type(error), error.reason) == (kind, reason)
    assert says in error.message
    assert TOKEN not in error.message
    assert len(hub.seen) <= 3, "tries are bounded"


def test_what_breaks_and_mends_goes_unnoticed(hub: FakeHub) -> None:
    hub.repo("org/lora", {"config.json": b"{}", WEIGHTS: BIG})
    hub.fault("/api/models", status=502)
    hub.fault("/api/models", cut_after=20)
    hub.fault("config.json", status=500)
    hub.fault(f"storage:/{WEIGHTS}", cut_after=1000)
    hub.fault(f"storage:/{WEIGHTS}", status=503)
    hub.fault(f"storage:/{WEIGHTS}", hang=True)
    assert read_all(source(hub, tries=1000, read_s=0.3), at("org/lora"))[WEIGHTS] == BIG


def test_a_broken_read_goes_on_where_it_broke(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    hub.fault(f"storage:/{WEIGHTS}", cut_after=50_000)
    assert read_all(source(hub), at("org/lora"))[WEIGHTS] == BIG
    ranges = [seen.byte_range for seen in hub.seen if seen.server == "storage"]
    assert ranges[:2] == ["bytes=0-65535", "bytes=50000-115535"]


def test_a_server_without_ranges_is_read_too(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    hub.fault(f"storage:/{WEIGHTS}", times=100, no_ranges=True)
    assert read_all(source(hub), at("org/lora"))[WEIGHTS] == BIG


@pytest.mark.parametrize(
    "edit", [lambda data: data + b"!", lambda data: data[:-1], lambda _: b""], ids=["longer", "shorter", "empty"]
)
def test_a_file_of_another_size_than_listed_is_not_believed(hub: FakeHub, edit: Any) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    hub.fault(f"storage:/{WEIGHTS}", times=100, edit=edit)
    assert refusal(source(hub), at("org/lora")).reason == Reason.SOURCE_UNREACHABLE


def test_a_hub_that_does_not_answer_is_given_up_in_time(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    hub.fault(WEIGHTS, times=100, hang=True)
    with source(hub).open(*at("org/lora"), everything) as snapshot:
        snapshot._hub = Hub(hub.url, quick_policy(read_s=0.2))  # type: ignore[attr-defined]
        with snapshot.open(WEIGHTS) as file, pytest.raises(Unavailable) as caught:
            file.read()
    assert caught.value.reason == Reason.SOURCE_UNREACHABLE
    assert "0 of 3145728 bytes" in caught.value.message
    closed = Hub("http://127.0.0.1:9", quick_policy())
    assert refusal(HfSource(closed, quick_policy()), at("org/lora")).reason == Reason.SOURCE_UNREACHABLE


def test_who_is_slower_than_the_least_rate_is_not_waited_for(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    clock = [0.0]
    policy = replace(quick_policy(), now=lambda: clock[0])
    patience_s = policy.patience_s(len(BIG))
    assert patience_s == policy.grace_s + len(BIG) / (64 << 10)
    with (
        HfSource(Hub(hub.url, policy), policy).open(*at("org/lora"), everything) as snapshot,
        snapshot.open(WEIGHTS) as file,
    ):
        clock[0] = patience_s
        assert file.read(1 << 20) == BIG[: 1 << 20]
        clock[0] = patience_s + 0.1
        with pytest.raises(Unavailable, match="too slow"):
            file.read()


def test_a_stop_ends_a_read_between_two_tries(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    policy = quick_policy(tries=1000, pause_s=10 * PATIENCE_S)
    hub.fault(f"storage:/{WEIGHTS}", times=1000, status=500)
    ended: list[Reason] = []
    reading = threading.Thread(
        target=lambda: ended.append(refusal(HfSource(Hub(hub.url, policy), policy), at("org/lora")).reason)
    )
    reading.start()
    policy.stopping.set()
    reading.join(PATIENCE_S)
    assert ended == [Reason.SOURCE_UNREACHABLE]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("http://169.254.169.254/latest/meta-data/iam", "metadata"),
        ("http://[fd00:ec2::254]/x", "metadata"),
        ("http://100.100.100.200/x", "metadata"),
        ("http://169.254.1.1/x", "no address of a server"),
        ("http://0.0.0.0:1/x", "no address of a server"),
        ("file:///etc/passwd", ""),
        ("gopher://127.0.0.1/x", ""),
        ("http://user:pw@127.0.0.1/x", ""),
    ],
)
def test_no_redirect_leads_to_the_metadata_service_or_elsewhere(hub: FakeHub, target: str, says: str) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    hub.fault("/resolve/", times=100, status=302, headers={"Location": target})
    error = refusal(source(hub), at("org/lora"))
    assert error.reason in (Reason.ENDPOINT_NOT_ALLOWED, Reason.SOURCE_UNREACHABLE)
    assert says in error.message
    assert "meta-data/iam" not in error.message


def test_redirects_without_end_are_given_up(hub: FakeHub) -> None:
    hub.repo("org/lora", {WEIGHTS: BIG})
    hub.fault("/resolve/", times=1000, status=302, headers={"Location": f"{hub.url}/org/lora/resolve/x/{WEIGHTS}"})
    assert refusal(source(hub), at("org/lora")).reason == Reason.SOURCE_UNREACHABLE
    assert len(hub.seen) < 40


@pytest.mark.parametrize(
    "path",
    [
        *("", "org", "org/", "/org/name", "//org/name", "org/name/", "org//name", "org/..", "../x/y", "org/name/../x"),
        *("a--b/c", "o/n.git", "org/na me", "org/name/a\x1b", "o\\n/x", "org/" + "n" * 97),
    ],
)
def test_what_is_no_repository_is_a_bad_uri(hub: FakeHub, path: str) -> None:
    assert refusal(source(hub), at(path)).reason == Reason.BAD_URI
    assert not hub.seen


def test_an_endpoint_of_the_request_is_refused() -> None:
    policy = quick_policy()
    sources = {"hf": HfSource(Hub("http://127.0.0.1:1", policy), policy)}
    with pytest.raises(Refused) as caught:
        source_of(sources, asked("hf:org/name", endpoint="http://evil")[0])
    assert caught.value.reason == Reason.BAD_URI
    assert "endpoint" in caught.value.message


@pytest.mark.parametrize("values", [{}, {"Token": b"x"}, {"token": b""}, {"token": b"a\nb"}, {"token": b"\xff"}])
def test_a_secret_without_a_token_says_which_key_it_needs(hub: FakeHub, values: dict[str, bytes]) -> None:
    error = refusal(source(hub), asked("hf:org/lora", Secret("team/hub", values)))
    assert error.reason == Reason.SECRET_INVALID
    assert "team/hub" in error.message
    assert "'token'" in error.message


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"sha": "main", "siblings": []},
        {"sha": "0" * 40},
        {"sha": "0" * 40, "siblings": [{"rfilename": "a.json"}]},
        {"sha": "0" * 40, "siblings": [{"rfilename": "a.json", "size": -1, "blobId": "x"}]},
        {"sha": "0" * 40, "siblings": [{"rfilename": "a.json", "size": "1", "blobId": "x"}]},
        {"sha": "0" * 40, "siblings": [{"rfilename": "a.json", "size": 1, "lfs": {"sha256": "zz"}}]},
    ],
)
def test_an_answer_that_no_hub_gives_is_not_believed(told: dict[str, Any]) -> None:
    with pytest.raises(Unavailable):
        parse_revision(told, "", everything, "hf:org/lora")


def test_rows_that_are_no_plain_files_are_not_looked_at() -> None:
    rows = [3, {"rfilename": 7}, {"rfilename": "../x"}, {"rfilename": ".hidden"}, {"rfilename": "a/b"}]
    assert parse_revision({"sha": "0" * 40, "siblings": rows}, "", everything, "hf:o/n") == ("0" * 40, {})


def test_a_listing_without_end_is_cut(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_depot.sources.hub.MAX_LISTING_BYTES", 1000)
    hub.repo("org/lora", {f"{number}.json": b"{}" for number in range(50)})
    assert refusal(source(hub), at("org/lora")).reason == Reason.TOO_LARGE


def test_a_token_is_in_no_text_about_its_secret() -> None:
    assert TOKEN not in repr(at("org/lora", token=TOKEN))
