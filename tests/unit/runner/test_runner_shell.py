"""The small parts of the shell: flags, identity, wire, blobs from the depot, which threads."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from harness.desired import desired, whole
from harness.runner_machine import start_of
from harness.small_disk import fill
from harness.waiting import wait_until
from weft.domain.adapter import Tier
from weft.domain.machine import Kind, Peer, Received
from weft.domain.model.config import parse_spec
from weft.domain.request import EndReason
from weft.domain.runner import RunnerOrder
from weft_kernels.cpu import cpu_quota
from weft_runner.core import BatchLimits
from weft_runner.errors import AdapterInvalid, ArtifactUnknown, ArtifactUnreachable, CacheFull, StoppedAtStart
from weft_runner.settings import parse_settings
from weft_runner.shell.adapter_pool import failure_of
from weft_runner.shell.depot import DepotSource
from weft_runner.shell.engine_factory import build_engine, default_threads, pool_limits
from weft_runner.shell.process import fetch_base, read_identity
from weft_runner.shell.server import started

DIGEST = "sha256:" + "a" * 64
FLAGS = [
    "--listen=127.0.0.1:1", "--probes=127.0.0.1:2", "--supervisor=127.0.0.1:3", "--depot=http://127.0.0.1:4",
    "--data-dir=/tmp/x", "--pool=a/b", f"--base-digest={DIGEST}",
]  # fmt: skip


def test_the_defaults_are_those_of_the_contract(small_config):
    settings = parse_settings(FLAGS)
    assert (settings.page_tokens, settings.kv_pages, settings.max_sequences, settings.max_adapters) == (16, 1024, 32, 0)
    assert (settings.max_rank, settings.max_batch_tokens, settings.max_prefills) == (64, 512, 0)
    assert (settings.executor, settings.dtype, settings.advertise) == ("auto", "bf16", settings.listen)
    assert (settings.token_time_ms, settings.profile) == (0, True)
    chosen = replace(settings, max_prefills=4, host_mib=3)
    limits = pool_limits(chosen, parse_spec(small_config), page_bytes=1024, slots=8)
    assert limits.host_bytes == 3 << 20
    assert limits.max_context_tokens == 256, "the model's, below what the pages hold"
    assert limits.batch == BatchLimits(4, 512, chunk_time_ms=100.0), "no objective: only prompts keep to a time"
    stated = pool_limits(parse_settings([*FLAGS, "--token-time-ms=50"]), parse_spec(small_config), 1024, slots=8)
    assert (stated.batch.token_time_ms, stated.batch.prompt_time_ms) == (50.0, 50.0)
    few = parse_settings([*FLAGS, "--kv-pages=3"])
    assert pool_limits(few, parse_spec(small_config), 1024, slots=8).max_context_tokens == 48


def test_a_runner_is_called_by_its_name_or_its_hosts():
    assert parse_settings(FLAGS).name == socket.gethostname()
    assert parse_settings([*FLAGS, "--name=demo-runners-7c9-x2"]).name == "demo-runners-7c9-x2"


def test_every_wrong_flag_is_listed_at_once(capsys):
    wrong = [
        "--listen=x",
        "--max-rank=0",
        "--max-batch-tokens=8",
        "--base-digest=abc",
        "--pool=x",
        "--depot=ftp://x",
        "--name=two words",
        "--token-time-ms=-1",
    ]
    with pytest.raises(SystemExit) as left:
        parse_settings([*FLAGS, *wrong])
    assert left.value.code == 2
    text = capsys.readouterr().err
    assert all(flag.partition("=")[0] in text for flag in wrong)


def test_more_threads_than_the_quota_allows_are_refused(capsys):
    quota = cpu_quota()
    assert parse_settings([*FLAGS, f"--threads={quota}"]).threads == quota
    with pytest.raises(SystemExit) as left:
        parse_settings([*FLAGS, f"--threads={quota + 1}"])
    assert left.value.code == 2
    assert f"--threads {quota + 1} is above the {quota} CPUs" in capsys.readouterr().err


def test_a_small_model_runs_on_one_thread_and_a_large_one_on_the_quota(small_config):
    assert default_threads(parse_spec(small_config)) == 1
    large = parse_spec(small_config | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4})
    assert default_threads(large) == cpu_quota()
    assert 1 <= cpu_quota() <= (os.cpu_count() or 1)


def test_the_uuid_stays_and_the_incarnation_changes(tmp_path):
    first, second = read_identity(tmp_path, "acme/p"), read_identity(tmp_path, "acme/p")
    assert first.uuid == second.uuid
    assert first.uuid.startswith("acme."), "a supervisor takes it from that namespace's certificates only"
    assert first.incarnation != second.incarnation


@pytest.mark.parametrize("content", [b"", b"no uuid\n", b"\xff\xfe", b"5b0e8a52-3a0f-4d7e"])
def test_a_damaged_uuid_is_drawn_anew_and_stays(content, tmp_path):
    first = read_identity(tmp_path, "acme/p")
    (tmp_path / "uuid").write_bytes(content)
    second, third = read_identity(tmp_path, "acme/p"), read_identity(tmp_path, "acme/p")
    assert first.uuid != second.uuid == third.uuid


# ---- wire


def test_the_log_names_a_request_as_the_gateways_log_does():
    fields = started(start_of("mine-0123", 1, [3], 5, client_request_id="mine"))["kv"]
    assert (fields["request_id"], fields["client_request_id"]) == ("mine-0123", "mine")


# ---- the depot


def source_of(depot, tmp_path: Path, base: str = DIGEST) -> DepotSource:
    return DepotSource(depot.url, tmp_path / "blobs", base, lambda: False)


def test_an_adapter_comes_from_the_depot_once_and_leaves_the_disk_when_it_is_no_longer_kept(world, depot, tmp_path):
    base = depot.publish("model", world.base)
    one, two = (depot.publish("adapter", world.write_adapter(f"a{i}", seed=i)) for i in range(2))
    source = source_of(depot, tmp_path, base)
    assert set(source.base()) == {"config.json", "model.safetensors"}
    files = source.adapter(one)
    assert files.scales.scale_of("model.layers.0.self_attn.q_proj", 4) == 2.0
    source.adapter(two)
    asked = len(depot.requests)
    source.adapter(one)
    assert len(depot.requests) == asked
    source.retain(frozenset([two]))
    assert source.on_disk() == (two,)
    assert set(source.base()) == {"config.json", "model.safetensors"}, "the base stays"


def test_adapters_on_demand_survive_a_restart_within_the_bound_least_recently_used_out_first(
    world, depot, tmp_path, monkeypatch
):
    monkeypatch.setattr("weft_runner.core.adapters.known.MAX_ON_DEMAND", 2)
    base = depot.publish("model", world.base)
    digests = [depot.publish("adapter", world.write_adapter(f"a{i}", seed=i)) for i in range(4)]
    source = source_of(depot, tmp_path, base)
    for at, digest in enumerate([*digests, digests[0]]):  # the first one again: the second is the oldest
        source.adapter(digest)
        os.utime(tmp_path / "blobs" / "sha256" / digest.removeprefix("sha256:"), (at, at))
    settings = parse_settings([*FLAGS, "--executor", "reference", "--data-dir", str(tmp_path)], profile=False)
    source = source_of(depot, tmp_path, base)
    built = build_engine(settings, source.base(), source, lambda _: None)
    built.engine.post(Received(Peer(Kind.SUPERVISOR, "s"), RunnerOrder(whole(desired(digests[3], tier=Tier.DISK)))))
    built.engine.run_once()
    wait_until(lambda: len(source.on_disk()) < 4, "the disk is tidied")
    built.engine.close()
    asked = len(depot.requests)
    assert set(source.on_disk()) == {digests[0], digests[2], digests[3]}
    source.adapter(digests[0])
    assert len(depot.requests) == asked, "nothing of it is downloaded again"


def test_a_full_disk_of_the_cache_is_named_and_the_adapter_comes_once_there_is_room(world, depot, small_disk):
    digest, notes = depot.publish("adapter", world.write_adapter("a")), []
    source = DepotSource(depot.url, small_disk / "blobs", DIGEST, lambda: False, on_full=notes.append)
    filler = fill(small_disk)
    with pytest.raises(CacheFull, match="no room for " + digest) as full:
        source.adapter(digest)
    assert notes == ["the disk of the cache is full"]
    assert failure_of(full.value) == (EndReason.RUNNER_FULL, str(full.value), False)
    filler.unlink()
    assert source.adapter(digest).tensors.stat().st_size


def test_a_damaged_file_of_base_or_adapter_is_fetched_again_before_anything_maps_it(world, depot, tmp_path):
    base, digest = depot.publish("model", world.base), depot.publish("adapter", world.write_adapter("a"))
    damaged = []
    blobs = tmp_path / "blobs"
    source = DepotSource(depot.url, blobs, base, lambda: False, on_damaged=lambda: damaged.append(1))

    def files() -> dict[str, bytes]:
        adapter = source.adapter(digest)
        found = {**source.base(), "adapter": adapter.tensors}
        assert adapter.scales.scale_of("model.layers.0.self_attn.q_proj", 4) == 2.0
        return {name: path.read_bytes() for name, path in found.items()}

    whole = files()
    for count, path in enumerate(sorted((blobs / "sha256").iterdir()), 1):
        content = path.read_bytes()
        path.write_bytes(content[:-1] if count % 2 else content[:-1] + bytes([content[-1] ^ 64]))
        assert files() == whole
        assert len(damaged) == count, path
    assert len(damaged) == 6, "two manifests of two files each"


def test_a_short_outage_of_the_depot_is_waited_out_and_a_long_one_is_unreachable(world, depot, tmp_path):
    digest = depot.publish("adapter", world.write_adapter("a"))
    for refusals, within_s in ((10, 15.0), (99, 20.0)):
        pauses: list[float] = []
        source = DepotSource(depot.url, tmp_path / f"{refusals}", DIGEST, lambda: False, pauses.append)
        depot.refusals = refusals
        if refusals == 10:
            assert source.adapter(digest).tensors.exists()
        else:
            with pytest.raises(ArtifactUnreachable):
                source.adapter(digest)
        assert 10.0 < sum(pauses) < within_s


def test_errors_of_the_depot_get_the_runners_names(world, depot, tmp_path):
    source = source_of(depot, tmp_path)
    with pytest.raises(ArtifactUnknown):
        source.adapter(DIGEST)
    dora = depot.publish("adapter", world.write_adapter("dora", use_dora=True))
    with pytest.raises(AdapterInvalid, match="DoRA"):
        source.adapter(dora)
    with pytest.raises(AdapterInvalid):
        source.adapter("no digest")
    stopped = DepotSource("http://127.0.0.1:1", tmp_path / "other", DIGEST, lambda: True)
    with pytest.raises(ArtifactUnreachable):
        stopped.adapter(DIGEST)


def test_a_depot_that_is_not_up_yet_is_waited_for_and_not_for_ever():
    class Late:
        tries = 0

        def base(self, progress=None):
            self.tries += 1
            if self.tries < 3:
                raise ArtifactUnreachable("not yet")
            return {"config.json": Path("x")}

    clock = iter(range(100))
    assert fetch_base(Late(), 10, lambda: False, lambda: float(next(clock)))
    with pytest.raises(ArtifactUnreachable):
        fetch_base(Late(), 1, lambda: False, lambda: float(next(clock)))
    with pytest.raises(StoppedAtStart):
        fetch_base(Late(), 10, lambda: True, lambda: float(next(clock)))
