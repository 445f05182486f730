"""Bars of one metric, as Mermaid that Markdown viewers draw: for figures that people would rather see than read."""

from collections.abc import Iterable, Sequence

from weft_bench.lines import Line


def charts(metrics: Sequence[str], lines: Iterable[Line]) -> list[str]:
    """A chart for each of the metrics that has at least two values, in the order given."""
    found = {metric: dict[str, float]() for metric in metrics}
    units = dict[str, str]()
    for line in lines:
        if line.metric in found and line.value is not None:
            found[line.metric][line.case] = line.value
            units[line.metric] = line.unit
    return [bars(metric, units[metric], values) for metric, values in found.items() if len(values) > 1]


def bars(title: str, unit: str, values: dict[str, float]) -> str:
    """Horizontal bars from zero, one a label."""
    labels = ", ".join(f'"{_plain(label)}"' for label in values)
    numbers = ", ".join(f"{value:.3g}" for value in values.values())
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta horizontal",
            f'    title "{_plain(title)} ({_plain(unit)})"',
            f"    x-axis [{labels}]",
            f"    y-axis 0 --> {max([1e-9, *values.values()]) * 1.1:.3g}",
            f"    bar [{numbers}]",
            "```",
        ]
    )


def _plain(text: str) -> str:
    """Without what would end a string of Mermaid."""
    return text.replace('"', "'").replace("\n", " ")
