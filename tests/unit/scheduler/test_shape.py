"""The shape of the scheduler's and the supervisor's code: the writers of each attribute."""

from pathlib import Path

import weft_scheduler.core
import weft_supervisor.core
from harness.shape import strangers

CORES = [Path(str(package.__file__)).parent for package in (weft_scheduler.core, weft_supervisor.core)]


def test_every_attribute_is_written_by_the_file_of_its_class() -> None:
    assert strangers(CORES) == []


def test_a_write_from_elsewhere_is_found(tmp_path: Path) -> None:
    fields = "self.runners: dict[str, int] = {}\n        self.size = 0\n        self.table: dict[str, int] = {}\n"
    (tmp_path / "one.py").write_text(f"class Pool:\n    def __init__(self):\n        {fields}")
    writes = ["pool.runners['a'] = 1", "pool.size += 1", "del pool.runners['a']", "pool.runners.clear()"]
    (tmp_path / "two.py").write_text("\n".join([*writes, "state.table['a'] = 1", "self.size = 1"]))
    found = ["pool.runners", "pool.runners", "pool.runners", "pool.size"]
    assert sorted(one.partition(" ")[2] for one in strangers([tmp_path])) == found
    (tmp_path / "three.py").write_text("state.table.pop('a')")
    assert sorted(one.partition(" ")[2] for one in strangers([tmp_path])) == [*found, "state.table", "state.table"]
