"""What stands beside a figure names no folder of the machine it comes from."""

import pytest

from weft_stage.machine import without_folders


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("/opt/venv/bin/python", "python"),
        ("A=1 LD_PRELOAD=/opt/lib/liba.so:/x/libb.so", "A=1 LD_PRELOAD=liba.so:libb.so"),
        ("--docs=/tmp/here", "--docs=here"),
        ("../shared/data", "../shared/data"),
        ("tiny,small", "tiny,small"),
        ("http://127.0.0.1:80", "http://127.0.0.1:80"),
    ],
)
def test_of_absolute_paths_only_the_last_part_is_told(word: str, told: str) -> None:
    assert without_folders(word) == told
