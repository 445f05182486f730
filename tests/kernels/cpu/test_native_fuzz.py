"""The fuzz target of the native step and sampler: its corpus breaks nothing, and what is broken it finds."""

import shutil
from pathlib import Path

import pytest

from harness.clang import sanitizing
from harness.native_fuzz import CORPUS, build, fuzz
from weft_kernels.cpu import PORTABLE, SOURCES, NativeUnavailable, Sources

pytestmark = pytest.mark.long  # clang builds for minutes, once


@pytest.fixture(scope="module", autouse=True)
def clang() -> None:
    try:
        sanitizing("address,undefined")
    except NativeUnavailable as error:
        pytest.skip(error.reason)


def test_the_corpus_breaks_nothing(tmp_path: Path):
    done = fuzz(build(), 0, tmp_path)
    assert done.finding == ""
    assert done.executions >= len(list(CORPUS.iterdir())) > 0


def test_a_check_that_is_missing_is_found(tmp_path: Path):
    shutil.copytree(SOURCES.folder, tmp_path / "src")
    sampling = tmp_path / "src" / "sampling.cpp"
    text = sampling.read_text()
    sampling.write_text(text.replace(" || rows[i].min_p > 1.0", ""))
    assert sampling.read_text() != text
    done = fuzz(build(what=Sources(tmp_path / "src", only=PORTABLE)), 0, tmp_path / "findings")
    assert "not so: code == (draws.valid ? 0 : WEFT_E_SIZE)" in done.finding
    assert list((tmp_path / "findings").iterdir())
