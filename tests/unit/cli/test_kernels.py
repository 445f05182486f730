"""What `weft up` and `weft serve` say before they start anything, where there is no compiler and no index."""

from pathlib import Path

import pytest

from weft_cli import kernels
from weft_cli.errors import BadInput, CommandError
from weft_cli.kernels import prepare_kernels
from weft_kernels.cpu import LevelUnusable

SENTENCE = r"there is no C\+\+ compiler, and none can be fetched \(.*\): install one, .* `apt install g\+\+`$"


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)


@pytest.mark.parametrize("executor", [None, "auto", "cpu"])
def test_where_nothing_can_compute_one_sentence_says_what_to_install(no_torch: None, executor: str | None) -> None:
    with pytest.raises(CommandError, match=f"^nothing here can compute: {SENTENCE}") as refused:
        prepare_kernels(executor)
    assert "\n" not in refused.value.message


def test_where_torch_can_compute_it_is_said_and_the_start_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_kernels(None)
    fetching, why = capsys.readouterr().err.splitlines()
    assert fetching.startswith("weft: there is no C++ compiler: fetching one for this build")
    assert why.startswith("weft: no CPU kernels: there is no C++ compiler, and none can be fetched")


@pytest.mark.parametrize("executor", ["cuda", "reference"])
def test_an_executor_that_needs_none_waits_for_none(
    executor: str, no_torch: None, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_kernels(executor)
    assert capsys.readouterr().err == ""


def test_a_level_that_cannot_be_used_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**_: object) -> None:
        raise LevelUnusable("avx1024", "there is no such level", ("portable",))

    monkeypatch.setattr("weft_kernels.cpu.library.load", load)
    with pytest.raises(BadInput, match=r"^\$WEFT_CPU_LEVEL: instruction level 'avx1024'"):
        prepare_kernels(None)
