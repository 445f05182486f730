"""Equal seeds draw equal inputs, in any process."""

import importlib.util
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st


def drawn() -> list[int]:
    """Draw numbers of one seed."""
    numbers = list[int]()

    @seed(7)
    @settings(max_examples=300, database=None)
    @given(st.integers())
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    return numbers


def test_a_module_that_is_imported_meanwhile_changes_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis takes constants from local modules that are imported, unless tests/conftest.py forbids it."""
    before = drawn()
    with TemporaryDirectory(prefix="local-") as folder:  # no path of a test: Hypothesis would pass it by
        source = Path(folder) / "constants.py"
        source.write_text(f"NUMBERS = {[1_000_003 * number for number in range(1, 500)]}")
        spec = importlib.util.spec_from_file_location("constants_of_a_local_module", source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        assert drawn() == before
