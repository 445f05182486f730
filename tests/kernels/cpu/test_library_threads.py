"""How many threads: affinity, and quotas of both versions of cgroups, in trees like those the kernel shows."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_kernels.cpu import cgroup_cpu_limits, cpu_quota


class Tree:
    """A cgroup file system in a folder."""

    def __init__(self, folder: Path) -> None:
        self.mount, self.membership = folder / "cgroup", folder / "self"
        self.mount.mkdir()
        self.membership.write_text("0::/\n")

    def member_of(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def v2(self, path: str, text: str) -> None:
        self._write(self.mount / path.lstrip("/") / "cpu.max", text)

    def v1(self, place: str, quota_us: int) -> None:
        """`place`: controllers and path."""
        self._write(self.mount / place / "cpu.cfs_quota_us", str(quota_us))
        self._write(self.mount / place / "cpu.cfs_period_us", "100000")

    def cpus(self, allowed: int = 64) -> int:
        return cpu_quota(self.mount, self.membership, allowed)

    def _write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("members", "v2", "v1", "cpus"),
    [
        pytest.param(["0::/"], {}, {}, 7, id="no quota"),
        pytest.param(["0::/"], {"/": "max 100000"}, {}, 7, id="max"),
        pytest.param(["0::/pods/mine"], {"/pods/other": "100000 100000"}, {}, 7, id="a sibling's"),
        pytest.param(["9:name=systemd:/", "4:cpu:/docker/a", "0::/"], {}, {"cpu/docker/a": 300_000}, 3, id="version 1"),
        pytest.param(["4:cpu,cpuacct:/docker/a"], {}, {"cpu,cpuacct/docker/a": 300_000}, 3, id="two controllers"),
        pytest.param(["4:cpu:/pods/pod1/a"], {}, {"cpu": 200_000}, 2, id="the root where the host's path is not there"),
        pytest.param(["4:cpu:/"], {}, {"cpu": -1}, 7, id="version 1 without one"),
        pytest.param(["3:cpuacct:/", "2:cpuset:/"], {}, {"cpuacct": 100_000}, 7, id="cpuacct alone"),
    ],
)
def test_quotas_of_both_versions_count_and_the_affinity_where_there_is_none(
    tree: Tree, members: list[str], v2: dict[str, str], v1: dict[str, int], cpus: int
):
    tree.member_of(*members)
    for path, text in v2.items():
        tree.v2(path, text)
    for place, quota_us in v1.items():
        tree.v1(place, quota_us)
    assert tree.cpus(7) == cpus


def test_a_path_that_leads_out_of_the_mount_is_not_followed(tree: Tree, tmp_path: Path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    tree.member_of("0::/../")
    assert tree.cpus(7) == 7


def test_where_nothing_can_be_read_the_affinity_counts(tmp_path: Path):
    assert cpu_quota(tmp_path / "none", tmp_path / "none", 3) == 3


@given(
    allowed=st.integers(1, 256),
    levels=st.lists(st.one_of(st.none(), st.tuples(st.integers(1_000, 10**8), st.integers(1_000, 10**6))), max_size=4),
)
def test_never_more_than_any_level_grants_and_never_none(
    tmp_path_factory: pytest.TempPathFactory, allowed: int, levels: list[tuple[int, int] | None]
):
    tree = Tree(tmp_path_factory.mktemp("tree"))
    path = ""
    for i, level in enumerate(levels):
        path += f"/level{i}"
        tree.v2(path, "max 100000" if level is None else f"{level[0]} {level[1]}")
    tree.member_of(f"0::{path or '/'}")
    granted = [quota / period for quota, period in filter(None, levels)]
    assert sorted(cgroup_cpu_limits(tree.mount, tree.membership)) == sorted(granted)
    cpus = tree.cpus(allowed)
    assert 1 <= cpus <= allowed
    assert all(cpus <= max(1.0, grant) for grant in granted)
    assert cpus == allowed or cpus == max(1, int(min(granted)))
