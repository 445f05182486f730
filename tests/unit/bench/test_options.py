"""Options of benchmarks: what the command line accepts, and what it says of the rest."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from weft_bench.cases import CROWDS
from weft_bench.options import option, parse
from weft_trouble.crowds import KINDS


@dataclass(frozen=True)
class Example:
    """An example.

    More about it.
    """

    shapes: tuple[str, ...] = option(("tiny",), "models", ("tiny", "mid"))
    rows: tuple[int, ...] = option((1, 16), "rows of a step", minimum=1)
    rounds: int = option(20, "rounds", minimum=2)
    level: str | None = option(None, "level of the kernels")
    quick: bool = option(False, "few rounds")
    of_: Path | None = option(None, "a folder, 100 % of it")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", Example()),
        ("--shapes mid,tiny,mid --rows 4 --quick", Example(("mid", "tiny"), (4,), quick=True)),
        ("--level avx2 --of x/y --rounds 3", Example(rounds=3, level="avx2", of_=Path("x/y"))),
    ],
)
def test_words_are_options(words: str, expected: Example) -> None:
    assert parse("example", Example, words.split(), Path("docs")) == (expected, Path("docs"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shapes huge", "--shapes: expected one of tiny, mid, got 'huge'"),
        ("--shapes ,", "--shapes: expected at least one value"),
        ("--rows 4,x", "--rows: expected a whole number, got 'x'"),
        ("--rounds 1", "--rounds: expected at least 2, got '1'"),
        ("--round 3", "unrecognized arguments: --round 3"),
    ],
)
def test_a_wrong_option_is_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("example", Example, words.split(), Path("docs"))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_each_option_with_choices_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("example", Example, ["--help"], Path("docs"))
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "An example. More about it." in text
    for words in ("models (tiny, mid; default: tiny)", "rows of a step (default: 1, 16)", "a folder, 100 % of it"):
        assert words in text


def test_the_table_names_the_crowds_that_clients_can_make() -> None:
    assert CROWDS == KINDS
