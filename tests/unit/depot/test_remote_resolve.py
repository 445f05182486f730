"""From a remote source to a digest: verdict before weights, rights before contents, one hanging host among many."""

import functools
import json
import logging
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.fake_hub import FakeHub, HubRepo
from harness.waiting import PATIENCE_S
from tests.unit.artifacts.making import MODEL_CONFIG, lora, refused, write_adapter, write_model
from tests.unit.depot.conftest import Bench
from tests.unit.depot.reading import folder_bytes, quick_policy, remote_source
from weft.artifacts.depot_api import OperationStatus, ResolveRequest
from weft.artifacts.digest import Digest, digest_of
from weft.artifacts.errors import ArtifactError, Reason, Refused, Unavailable
from weft.domain.model.config import parse_model_config
from weft_depot.core import ConcurrencyLimits
from weft_depot.credentials import Secret
from weft_depot.resolution_cache import ResolutionCache
from weft_depot.resolve import Resolver
from weft_depot.service import Depot

WEIGHTS = "adapter_model.safetensors"
TOKEN, OTHER = "hf_TheTokenOfTeamA", "hf_AnotherToken"
WIDE = {"hidden_size": 256, "intermediate_size": 256}


class SomeSecrets:
    """Secrets by namespace/name, as a cluster has them; counts the reads."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, bytes]] = {}
        self.reads = 0

    def read(self, namespace: str, name: str) -> Secret:
        self.reads += 1
        where = f"{namespace}/{name}"
        if where not in self.values:
            raise Refused(Reason.SECRET_MISSING, f"Secret {where} does not exist")
        return Secret(where, self.values[where])


@functools.cache
def wide_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the files of a model in two shards, and of an adapter that is larger than a range."""
    shape = parse_model_config(json.dumps({**MODEL_CONFIG, **WIDE}).encode())
    with tempfile.TemporaryDirectory() as made:
        model = write_model(Path(made) / "wide", config=WIDE, shards=2, of=shape)
        adapter = write_adapter(Path(made) / "big", config={"r": 64}, tensors=lora(rank=64, of=shape))
        return folder_bytes(model), folder_bytes(adapter)


class Remote:
    """A bench whose resolver also reads from a hub that holds a wide model and a large adapter."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        self.hub, self.secrets, self.now = hub, SomeSecrets(), 0.0
        self.bench = Bench(folder)
        self.model, self.adapter = wide_files()
        hub.repo("org/tiny", self.model)
        self.repo = hub.repo("org/lora", self.adapter)
        self.open()

    def open(self, recheck_s: float = 0.0) -> None:
        sources = {**self.bench.resolver.sources, "hf": remote_source("hf", f"--hf-endpoint={self.hub.url}")}
        resolutions = ResolutionCache(self.bench.folder / "data" / "resolved", recheck_s)
        self.bench.resolver = Resolver(
            sources, self.bench.store, resolutions, secrets=self.secrets, now=lambda: self.now
        )

    def resolve(self, uri: str = "hf:org/lora", kind: str = "adapter", **fields: Any) -> Digest:
        if kind == "adapter":
            fields.setdefault("base", {"digest": self.base, "name": "tiny"})
        return self.bench.resolve(uri, kind, maxRank=64, **fields)

    @property
    def base(self) -> Digest:
        return self.bench.resolve("hf:org/tiny", "model")

    def asked(self) -> list[str]:
        """What the hub and its storage were asked since the last look."""
        paths = [f"{seen.server} {seen.path}" for seen in self.hub.seen if "tiny" not in seen.path]
        self.hub.seen.clear()
        return [path for path in paths if not path.startswith("storage /model")]

    def private(self, **fields: Any) -> HubRepo:
        self.secrets.values["team-a/hub"] = {"token": TOKEN.encode()}
        return self.hub.repo("org/lora", self.adapter, tokens=frozenset((TOKEN,)), **fields)

    def refusal(self, **fields: Any) -> ArtifactError:
        with pytest.raises(ArtifactError) as caught:
            self.resolve(**fields)
        self.bench.check()
        return caught.value


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    with FakeHub() as hub:
        yield Remote(tmp_path, hub)


A: dict[str, Any] = {"namespace": "team-a", "credentialsRef": {"name": "hub"}}


def test_a_sharded_model_and_its_adapter_come_from_a_hub(remote: Remote) -> None:
    names = [entry.name for entry in remote.bench.manifest(remote.base).files]
    assert names == sorted(set(remote.model) - {"README.md"})
    manifest = remote.bench.manifest(remote.resolve())
    for name, content in remote.adapter.items():
        assert remote.bench.store.file(manifest, name).read_bytes() == content
    remote.bench.check()


def test_the_verdict_comes_before_the_weights(remote: Remote) -> None:
    body = {"kind": "adapter", "uri": "hf:org/lora", "namespace": "default", "base": {"digest": remote.base}}
    request, asked = ResolveRequest.parse(json.dumps(body).encode()), list[int]()

    def validated(_: object) -> None:
        asked.append(remote.hub.bytes_asked(WEIGHTS))

    with remote.bench.store.lease() as lease:
        remote.bench.resolver.resolve(request, lease, validated, lambda: None)
    assert asked == [64 << 10]
    assert len(remote.adapter[WEIGHTS]) > 400_000


def test_a_bad_header_ends_it_before_the_weights_move(remote: Remote) -> None:
    body = {"base": {"digest": remote.base, "name": "tiny"}, "maxRank": 8}
    with refused(Reason.RANK_TOO_LARGE):
        remote.bench.resolve("hf:org/lora", **body)
    assert remote.hub.bytes_asked(WEIGHTS) == 64 << 10


def test_an_unchanged_source_costs_one_request(remote: Remote) -> None:
    first = remote.resolve()
    remote.asked()
    assert remote.resolve() == first
    assert remote.asked() == ["hub /api/models/org/lora/revision/main"]
    remote.repo.commit({**remote.adapter, "README.md": b"a new commit that changes nothing of it"})
    assert remote.resolve() == first
    assert remote.asked() == ["hub /api/models/org/lora/revision/main"]


def test_a_source_that_was_in_order_is_left_alone_for_a_while(remote: Remote) -> None:
    remote.private()
    remote.open(recheck_s=30)
    first = remote.resolve(**A)
    reads = remote.secrets.reads
    remote.asked()
    remote.now = 29.9
    assert remote.resolve(**A) == first
    assert (remote.asked(), remote.secrets.reads) == ([], reads)
    assert remote.bench.verdicts[-1]["rank"] == 64
    remote.now = 30.0
    assert remote.resolve(**A) == first
    assert remote.asked() == ["hub /api/models/org/lora/revision/main"]


def test_what_failed_is_looked_at_whenever_somebody_asks(remote: Remote) -> None:
    remote.open(recheck_s=30)
    remote.hub.fault("lora/revision", times=100, status=500)
    assert remote.refusal().reason == Reason.SOURCE_UNREACHABLE
    remote.hub.faults.clear()
    assert remote.resolve()


def test_what_one_namespace_was_given_is_not_handed_to_another(remote: Remote) -> None:
    remote.private()
    digest = remote.resolve(**A)
    assert remote.refusal(namespace="team-b").reason == Reason.SOURCE_NOT_FOUND
    assert remote.refusal(namespace="team-a").reason == Reason.SOURCE_NOT_FOUND, "nor without the credentials"
    remote.secrets.values["team-b/hub"] = {"token": OTHER.encode()}
    assert remote.refusal(**{**A, "namespace": "team-b"}).reason == Reason.SOURCE_NOT_FOUND
    assert remote.resolve(**A) == digest


def test_a_listing_that_all_may_see_gives_no_right_to_the_files(remote: Remote) -> None:
    """A gated repository shows its listing, and so its content ids, to everybody."""
    remote.private(gated=True)
    remote.resolve(**A)
    for namespace in ("team-a", "team-b"):
        assert remote.refusal(namespace=namespace).reason == Reason.SOURCE_FORBIDDEN
    remote.secrets.values["team-a/hub"] = {"token": OTHER.encode()}
    assert remote.refusal(**A).reason == Reason.SOURCE_FORBIDDEN, "other credentials have to show what they may"


def test_new_credentials_show_that_they_may_read_and_download_nothing_again(remote: Remote) -> None:
    repo = remote.private(gated=True)
    digest = remote.resolve(**A)
    repo.tokens = frozenset((OTHER,))
    remote.secrets.values["team-a/hub"] = {"token": OTHER.encode()}
    remote.hub.seen.clear()
    assert remote.resolve(**A) == digest
    assert remote.hub.bytes_asked(WEIGHTS) == 64 << 10
    remote.asked()
    assert remote.resolve(**A) == digest
    assert remote.asked() == ["hub /api/models/org/lora/revision/main"], "shown once"


def test_a_secret_that_is_withdrawn_is_noticed(remote: Remote) -> None:
    remote.private()
    remote.resolve(**A)
    del remote.secrets.values["team-a/hub"]
    assert remote.refusal(**A).reason == Reason.SECRET_MISSING


def test_content_that_is_not_what_was_promised_is_refused(remote: Remote) -> None:
    remote.hub.fault("storage:/" + WEIGHTS, times=100, edit=lambda data: data[:-4] + b"\0\0\0\0")
    error = remote.refusal()
    assert error.reason == Reason.DIGEST_MISMATCH
    assert "promised" in error.message
    remote.hub.faults.clear()
    assert remote.resolve()


@pytest.fixture
def broken_off(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights are cut off in their second range, for longer than anybody tries: what is left of them."""
    monkeypatch.setattr("weft_depot.staging.CHUNK_BYTES", 1 << 14)
    assert remote.base
    remote.hub.fault("bytes=65536-", times=100, status=500)
    with pytest.raises(Unavailable, match="broke at 65536"):
        remote.resolve()
    remote.hub.faults.clear()
    remote.hub.seen.clear()
    (part,) = (remote.bench.folder / "data" / "blobs" / "partial").iterdir()
    assert part.read_bytes() == remote.adapter[WEIGHTS][:65536]
    return part


def test_a_download_that_was_broken_off_is_gone_on_with_also_after_a_restart(remote: Remote, broken_off: Path) -> None:
    assert broken_off.stat().st_size == 65536
    remote.bench.open()
    remote.open()
    assert remote.resolve()
    large = [seen.byte_range for seen in remote.hub.seen if seen.path.endswith(WEIGHTS) and seen.server == "storage"]
    assert large == ["bytes=0-65535", f"bytes=65536-{len(remote.adapter[WEIGHTS]) - 1}"], "the header, then the rest"
    remote.bench.check()


@pytest.mark.parametrize("damage", [lambda data: b"\0" * len(data), lambda data: data * 100, lambda _: b""])
def test_what_is_left_of_a_download_is_not_believed(
    remote: Remote, broken_off: Path, damage: Callable[[bytes], bytes]
) -> None:
    broken_off.write_bytes(damage(broken_off.read_bytes()))
    manifest = remote.bench.manifest(remote.resolve())
    assert remote.bench.store.file(manifest, WEIGHTS).read_bytes() == remote.adapter[WEIGHTS]
    remote.bench.check()


def test_what_is_left_of_a_download_goes_when_nobody_asks_for_it_any_more(remote: Remote, broken_off: Path) -> None:
    part = broken_off
    with remote.bench.store.lease() as lease:
        lease.name(f"sha256:{part.stem}")
        assert remote.bench.store.sweep(part.stat().st_mtime + 1) == 0
    assert remote.bench.store.sweep(part.stat().st_mtime) == 0
    assert remote.bench.store.sweep(part.stat().st_mtime + 1) == 1
    remote.bench.check()


def test_two_who_download_the_same_at_once_do_not_wait_for_each_other(remote: Remote) -> None:
    digest = digest_of(remote.adapter[WEIGHTS])
    with remote.bench.store.writer(digest) as busy:
        busy.write(b"half")
        assert remote.resolve()
    assert remote.bench.store.read(digest, max_bytes=1 << 30) == remote.adapter[WEIGHTS]


def test_no_secret_is_written_or_logged(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    remote.private()
    remote.resolve(**A)
    remote.hub.fault("/resolve/", times=100, status=403)
    remote.repo.commit(remote.adapter)
    remote.hub.repos["org/lora"].commit({**remote.adapter, "adapter_config.json": b"{}"})
    message = remote.refusal(**A).message
    assert TOKEN not in caplog.text + message
    for path in remote.bench.folder.rglob("*"):
        assert TOKEN.encode() not in (path.read_bytes() if path.is_file() else b"")


def test_a_download_that_cannot_fit_is_not_begun(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    base = remote.base
    monkeypatch.setattr("weft_depot.resolve.shutil.disk_usage", lambda _: type("", (), {"free": 100_000}))
    remote.hub.seen.clear()
    error = remote.refusal(base={"digest": base})
    assert error.reason == Reason.DEPOT_FULL
    assert "100000 free" in error.message
    assert remote.hub.bytes_asked(WEIGHTS) == 64 << 10


@pytest.mark.parametrize("fields", [{"endpoint": "http://evil"}, {"revision": "x\n"}])
def test_options_that_mean_nothing_are_refused(remote: Remote, fields: dict[str, Any]) -> None:
    error = remote.refusal(base=None, kind="model", uri="file:models/tiny", **fields)
    assert error.reason == Reason.BAD_URI
    assert next(iter(fields)) in error.message
    assert remote.refusal(base=None, kind="model", uri="file:models/tiny", **A).reason == Reason.BAD_URI
    assert remote.secrets.reads == 0


class Served:
    """The loop side over a remote bench."""

    def __init__(self, remote: Remote, limits: ConcurrencyLimits) -> None:
        self.remote, stopping = remote, threading.Event()
        self.depot = Depot(remote.bench.resolver, limits=limits, stopping=stopping)

    def submit(self, uri: str, namespace: str) -> str:
        found = self.depot.submit(ResolveRequest(kind="model", uri=uri, namespace=namespace))
        assert found
        return found

    async def finish(self, operation_id: str) -> OperationStatus:
        found = await self.depot.wait(operation_id, PATIENCE_S, for_end=True)
        assert found
        assert found.finished
        return found


@pytest.fixture
async def served(remote: Remote) -> AsyncIterator[Served]:
    served = Served(remote, ConcurrencyLimits(total=4, per_host=3, per_owner=1))
    yield served
    served.remote.hub.closing.set()
    served.depot.close()


async def test_a_host_that_hangs_holds_up_nobody_else(served: Served, remote: Remote) -> None:
    hf = remote_source("hf", f"--hf-endpoint={remote.hub.url}", policy=quick_policy(read_s=10 * PATIENCE_S))
    remote.bench.resolver.sources["hf"] = hf  # type: ignore[index]
    remote.hub.repo("org/hangs", remote.model)
    remote.hub.fault("org/hangs", times=1000, hang=True)
    hung = [served.submit(f"hf:org/hangs/{number}", f"team-{number % 2}") for number in range(20)]
    assert remote.hub.hung.wait(PATIENCE_S)
    for uri, namespace in (("hf:org/tiny", "team-c"), ("file:models/tiny", "team-0")):
        found = await served.finish(served.submit(uri, namespace))
        assert found.state == "Fetched", f"{uri} of {namespace}: {found.message}"
    states = [served.depot.operations.find(operation) for operation in hung]
    assert all(state and state.state == "Pending" for state in states)
    served.depot._queue.check_queue()
