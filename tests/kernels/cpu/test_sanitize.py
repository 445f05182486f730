"""`make sanitize` sees what it is for: an overrun and a race, which the library is asked for here."""

import pytest

from harness.sanitize import SANITIZERS, run_python
from weft_kernels.cpu import NativeUnavailable, load

pytestmark = pytest.mark.long  # each sanitizer builds for minutes, once

WRONG = {
    "asan+ubsan": """
import numpy as np
from weft_kernels.cpu import load
from weft_kernels.cpu import sampling
library, logits = load(), np.ones(8192, np.float32)
Sampler(library.native, library.level_number).sample(logits.ctypes.data + 4, 8192, 8192, 1)
""",
    "tsan": """
import ctypes
from threading import Thread
from weft_kernels.cpu import load
library = load()
to, source = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(1 << 20)
def copy():
    with library.pool(1) as pool:
        for _ in range(50):
            library.copy(pool, [ctypes.addressof(to)], [ctypes.addressof(source)], 1 << 20)
threads = [Thread(target=copy) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
}
SAID = {"asan+ubsan": "heap-buffer-overflow", "tsan": "data race"}


@pytest.mark.parametrize("name", SANITIZERS)
def test_what_the_library_does_wrong_is_reported(name: str) -> None:
    try:
        outcome = run_python(name, load().levels[0], ("-c", WRONG[name]))
    except NativeUnavailable as error:
        pytest.skip(error.reason)
    assert SAID[name] in outcome.reports, outcome.output
    assert not outcome.good
