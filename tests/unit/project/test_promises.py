"""Each promise of the pages has a test by name and a break that is planted; those without become fewer."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.mutants.promises import PAGES, PROMISES, ROOT, faults, promised, read_promises


def test_every_entry_fits_its_page_its_test_and_the_source() -> None:
    assert list(faults(read_promises(PROMISES)[0])) == []


@pytest.mark.parametrize("page", PAGES)
def test_promises_without_a_break_become_fewer(page: str) -> None:
    promises, without = read_promises(PROMISES)
    broken = {one.row for one in promises if one.page == page}
    missing = [row for row in promised(ROOT / "docs" / page) if row not in broken]
    assert len(missing) == without[page], (
        f"{PROMISES.name} says {without[page]} rows of {page} have no break; now: {missing}"
    )


@pytest.mark.parametrize(
    ("text", "instead"), [("USER", "USER"), ("COPY", "ADD"), ("a text that is not there", ""), ("", "USER 0:0")]
)
def test_an_edit_is_of_a_text_that_stands_once_and_changes_it(text: str, instead: str) -> None:
    one = next(one for one in read_promises(PROMISES)[0] if one.file == "images/control.Containerfile")
    assert list(faults([one])) == []
    (fault,) = faults([replace(one, text=text, instead=instead)])
    assert f"expected a text that stands once in {one.file}" in fault


@pytest.mark.parametrize("place", ["", "instead = ''\noperator = 'not'\nfunction = ''", "operator = 'not'"])
def test_an_entry_has_either_a_mutants_place_or_an_edit(tmp_path: Path, place: str) -> None:
    entry = "[[promise]]\npage = 'a'\nrow = 'b'\ntest = 'c'\nfile = 'd'\ntext = 'e'\n"
    (tmp_path / "promises.toml").write_text(f"{entry}{place}\n")
    with pytest.raises(ValueError, match=r"expected .*text, got"):
        read_promises(tmp_path / "promises.toml")
