"""How a request walks through the code: every Python call of some files, in order, and what a page tells of it."""

import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from harness.costs import without_collector

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
NAME = re.compile(r"`([a-z_]+\.[A-Za-z_.]+)`")


class Call(NamedTuple):
    """One call: its function, its caller's, and how many frames of the traced files are on the stack."""

    code: CodeType
    caller: CodeType
    frames: int

    @property
    def path(self) -> Path:
        return Path(self.code.co_filename)

    @property
    def name(self) -> str:
        """`module.Class.function`, without what is local."""
        return f"{self.path.stem}.{self.code.co_qualname.partition('.<locals>')[0]}"


@contextmanager
def traced(roots: tuple[str, ...], on_call: Callable[[FrameType, FrameType], None]) -> Generator[None]:
    """Call `on_call(frame, caller's frame)` at every call of Python code of the files below `roots`, in this thread."""

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(roots) and frame.f_back is not None:
            on_call(frame, frame.f_back)

    before = sys.getprofile()
    with without_collector():  # finalisers of product code would be calls of the walk
        sys.setprofile(on_event)
        try:
            yield
        finally:
            sys.setprofile(before)


def callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frame and those that it was called from, the nearest first."""
    above: FrameType | None = frame
    while above is not None:
        yield above
        above = above.f_back


def names_out_of_order(section: str, calls: list[Call]) -> list[str]:
    """Return the names in backticks of a section's numbered list that are not called after those before them."""
    text = PAGE.read_text().partition(f"## {section}")[2].partition("\n## ")[0]
    told = [name for step in re.findall(r"^\d+\. .*(?:\n   .*)*", text, re.MULTILINE) for name in NAME.findall(step)]
    assert len(told) > 12, "the page has lost its list"
    rest = iter([call.name for call in calls])
    return [name for name in told if not any(name == called or called.endswith(f".{name}") for called in rest)]
