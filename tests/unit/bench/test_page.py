"""Pages of figures: the generated part, beside text that people write."""

from pathlib import Path

import pytest

from weft_bench import cases, page
from weft_bench.cases import Benchmark, Page
from weft_bench.page import MARK, write_page
from weft_stage.lines import Origin, append

RUN = Origin("weft bench path", "a machine", "Python 3.11")


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = {"path": Benchmark(object, "stack", ("*fast", "rate")), "other": Benchmark(object, "peers")}
    for module in (cases, page):
        monkeypatch.setattr(module, "BENCHMARKS", rows)
        monkeypatch.setattr(module, "PAGES", {"stack": Page("The stack", "rate")})
    lines = [
        RUN.line("1 stream", "rate", 1.0, "tok/s"),
        RUN.line("1 stream", "rate", 40.0, "tok/s", baseline=80.0, target=">= 50"),
        RUN.line("32 streams", "rate", 1234.0, "tok/s", bound_fraction=0.5, target=">= 50"),
        RUN.line("1 stream", "times as fast", 0.9, ""),
        RUN.line("1 stream", "hidden", 7.008, "", target="<= 7"),
    ]
    append(tmp_path / "raw" / "path.jsonl", lines)
    append(tmp_path / "raw" / "other.jsonl", [RUN.line("elsewhere", "rate", 1.0, "")])
    return tmp_path


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| case", "| ---"))]


def test_the_page_has_the_newest_figures_and_names_slower_cells(docs: Path) -> None:
    text = write_page(docs, "stack").read_text()
    assert (
        "## Figures of `weft bench path`\n\n| case | rate | times as fast | run |\n| --- | ---: | ---: | ---: |\n"
        in text
    )
    assert rows_of(text) == [
        "| 1 stream | 40 tok/s (**missed**: >= 50 tok/s) | 0.9 | 1 |",
        "| 32 streams | 1,234 tok/s |  | 1 |",
    ]
    slower = text.partition("## Where Weft is slower, or misses a target\n\n")[2].partition("\n\n")[0]
    assert slower.splitlines() == [
        "- 1 stream: rate: 40 tok/s, target >= 50 tok/s",
        "- 1 stream: times as fast: 0.9",
        "- 1 stream: hidden: 7.008, target <= 7",  # which the table does not show
    ]
    assert "bar [1234, 40]" in text
    assert "`weft bench path`, a machine" in text


def test_many_metrics_have_a_row_for_each_figure(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_METRICS", 1)
    assert rows_of(write_page(docs, "stack").read_text()) == [
        "| 1 stream | rate | 40 tok/s | 0.5 |  | >= 50 tok/s: **missed** | 1 |",
        "| 32 streams | rate | 1,234 tok/s |  | 50% | >= 50 tok/s: met | 1 |",
        "| 1 stream | times as fast | 0.9 |  |  |  | 1 |",
    ]


def test_the_method_above_the_mark_stays(docs: Path) -> None:
    (docs / "stack.md").write_text(f"# Mine\n\nHow it is measured.\n\n{MARK}\n\nold\n")
    text = write_page(docs, "stack").read_text()
    assert text.startswith(f"# Mine\n\nHow it is measured.\n\n{MARK}\n\n```mermaid")
    assert "old" not in text
