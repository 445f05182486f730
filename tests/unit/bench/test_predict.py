"""`weft bench predict`: absent sets are said to be skipped; figures stand beside their baselines."""

import gzip
import json
from pathlib import Path

from weft_bench.lines import Origin
from weft_bench.predict import figures

HERE = Origin("c", "m", "v")


def test_absent_sets_are_skipped_and_said_to_be(tmp_path: Path) -> None:
    said: list[str] = []
    assert list(figures(HERE, tmp_path, said.append, (), tmp_path)) == []
    assert len(said) == 3
    assert all("skipped" in text for text in said)


def test_a_set_that_is_there_is_measured(tmp_path: Path) -> None:
    rows = (
        {
            "instruction": f"say word{i} {i % 7} times",
            "input": "",
            "n_in": 5,
            "n_out": 1 + 10 * (i % 7),
            "category": "c",
        }
        for i in range(600)
    )
    (tmp_path / "dolly_3k.jsonl.gz").with_suffix("").write_text("")  # another name: not taken

    with gzip.open(tmp_path / "dolly_3k.jsonl.gz", "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    said: list[str] = []
    lines = {line.metric: line for line in figures(HERE, tmp_path, said.append, (), tmp_path)}
    assert len(said) == 2
    assert lines["mean absolute error"].value is not None
    assert lines["mean absolute error"].ratio is not None
    assert lines["mean absolute error"].ratio < 1
    assert lines["coverage of p90, at least"].target == ">= 0.88"
