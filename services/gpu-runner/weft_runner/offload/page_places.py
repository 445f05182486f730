"""Places of an executor's KV pages: frames of memory, or extents of a file or of a GPU's host. Pure.

A page keeps its place while it passes from one sequence to the next, so that nothing is copied for a grant. At first
the pages with the lowest ids have the frames: those are the ones that the page table grants first. An adapter that is
on the device takes as many frames as it holds pages, whichever pages those are: memory has a frame less for each, and
a page that had the frame moves to the file. So **frames in use + frames taken = frames, and as many pages are in the
file as it has extents**, at any time; the bytes of both tiers never change.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft_runner.errors import OutOfMemory

TAKEN = np.iinfo(np.int32).max  # the place of a page whose adapter is elsewhere in memory


@dataclass(frozen=True, slots=True)
class Spill:
    """What is in `frame` has to be written to `extent`."""

    frame: int
    extent: int


@dataclass(slots=True)
class PagePlaces:
    """`places[page]`: its frame, or below 0 the complement of its extent (`~extent`)."""

    pages: int
    frames: int
    places: npt.NDArray[np.int32] = field(init=False)
    version: int = field(init=False, default=0)  # of `places`
    _taken: dict[int, int] = field(init=False, default_factory=dict[int, int])  # page of an adapter -> frame

    def __post_init__(self) -> None:
        assert 0 <= self.frames <= self.pages, (self.frames, self.pages)
        self.places = np.arange(self.pages, dtype=np.int32)
        self.places[self.frames :] = ~np.arange(self.extents, dtype=np.int32)

    @property
    def extents(self) -> int:
        """Number of extents of the file."""
        return self.pages - self.frames

    def take(self, pages: Iterable[int]) -> list[Spill]:
        """These pages are adapters' now. What has to be written first; the frames' memory is then not needed.

        Raises OutOfMemory: adapters hold more pages than there are frames.
        """
        spills: list[Spill] = []
        for page in pages:
            if page in self._taken:
                continue
            place = int(self.places[page])
            if place < 0:
                spill = Spill(*self._take_frame(~place))
                spills.append(spill)
                place = spill.frame
            self._taken[page] = place
            self.places[page] = TAKEN
        self.version += bool(spills)
        return spills

    def grant(self, pages: Iterable[int]) -> list[int]:
        """These pages are sequences' from now on: the frames among them, which have to be cleared."""
        for page in pages:
            if (frame := self._taken.pop(page, None)) is not None:
                self.places[page] = frame
        return [int(frame) for frame in self.places[list(pages)] if frame >= 0]

    def frame_taken_by(self, page: int) -> int:
        """Return the frame that an adapter's page took."""
        return self._taken[page]

    def _take_frame(self, extent: int) -> tuple[int, int]:
        """From the page with the highest id, which goes to the extent."""
        (holders,) = np.nonzero((self.places >= 0) & (self.places != TAKEN))
        if not len(holders):
            raise OutOfMemory(
                f"adapters hold more KV pages than the {self.frames} in memory: allow more --offload device, "
                "or fewer adapters at a time (--max-adapters)"
            )
        page = int(holders[-1])
        frame, self.places[page] = int(self.places[page]), ~extent
        return frame, extent
