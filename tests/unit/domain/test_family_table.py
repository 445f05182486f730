"""The table of families says what the data says, and the page is that of the data."""

from pathlib import Path

from weft.domain.model.families import FAMILIES
from weft.domain.model.family_table import HEADERS, MORE_HEADERS, main, page, rows

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"


def test_the_page_is_made_from_the_data(tmp_path: Path) -> None:
    assert main(["--write", str(tmp_path / "models.md")]) == 0
    assert PAGE.read_text() == page() == (tmp_path / "models.md").read_text(), "run `make models`"


def test_every_family_has_a_row_of_its_architectures_and_modules() -> None:
    for family, row in zip(FAMILIES, rows(wide=True), strict=True):
        cells = dict(zip((*HEADERS, *MORE_HEADERS), row, strict=True))
        assert cells["FAMILY"] == family.model_type
        assert cells["ADAPTERS ON"].split(", ") == [name.partition(".")[2] for name in family.modules]
        assert cells["ARCHITECTURES"].split(", ") == [*family.architectures]
