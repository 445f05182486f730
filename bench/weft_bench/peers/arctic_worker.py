"""arctic-inference's suffix cache at the other end of a pipe; see `vllm_worker.py`.

The work is {"most": guesses of a step}; each further line, {"answers", "warm", "cached": how many of the latest answers
are kept, -1: all}, is replayed in a cache of its own and answered by `Replayed` and {"bytes"} of the cache's tree, as
it estimates them.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))
from replay import replay  # pyright: ignore[reportMissingImports] (beside this script)
from vllm_worker import answer, own_stdout  # pyright: ignore[reportMissingImports]

MAX_TOKENS = 1 << 16  # of a request


class SuffixCache:
    """One cache with its own defaults; `Drafts`. Contexts are views of an array, the quicker of its two ways."""

    def __init__(self, cache: Any) -> None:
        self.cache, self._request = cache, 0
        self._tokens, self._length = np.zeros(MAX_TOKENS, np.int32), 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._request += 1
        self._length = len(prompt)
        self._tokens[: self._length] = prompt
        self.cache.start_request(self._request, self._tokens[: self._length])

    def draft(self, most: int) -> Sequence[int]:
        return self.cache.speculate(self._request, self._tokens[: self._length], max_spec_tokens=most).token_ids

    def take(self, tokens: Sequence[int]) -> None:
        before, self._length = self._length, self._length + len(tokens)
        self._tokens[before : self._length] = tokens
        self.cache.add_active_response(self._request, self._tokens[before : self._length])

    def end(self) -> None:
        self.cache.stop_request(self._request)


def main() -> None:
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    from arctic_inference import suffix_decoding  # pyright: ignore[reportMissingImports] (of another Python)

    answer(answers, {"ready": f"arctic-inference {version('arctic-inference')}"})
    for line in sys.stdin:
        asked = json.loads(line)
        drafts = SuffixCache(suffix_decoding.SuffixDecodingCache(max_cached_requests=asked["cached"]))
        replayed = replay(drafts, asked["answers"], asked["warm"], work["most"])
        answer(answers, asdict(replayed) | {"bytes": drafts.cache._global_tree.estimate_memory()})


if __name__ == "__main__":
    main()
