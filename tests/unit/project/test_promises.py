"""Each promise of the pages has a test by name and a break that is planted; those without become fewer."""

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
