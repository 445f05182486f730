"""What imports make is no work of the cyclic collector, which works again afterwards; malloc has few arenas."""

import gc
import subprocess
import sys

import pytest

from weft.process import long_lived_imports


def test_the_collector_rests_meanwhile_and_never_visits_what_was_made() -> None:
    before = gc.get_freeze_count()
    with long_lived_imports():
        made = [[number] for number in range(1000)]
        rests = not gc.isenabled()
    assert rests
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


ARENAS = """
import ctypes, sys, threading
from weft.process import keep_heap_small, long_lived_imports
with long_lived_imports():
    pass
if sys.argv[1] == "1":
    keep_heap_small()
libc, together = ctypes.CDLL(None), threading.Barrier(16)
libc.malloc.restype = ctypes.c_void_p
def take():
    libc.malloc(1 << 12)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""


@pytest.mark.parametrize("arenas", [2, 1])
def test_threads_share_few_arenas(arenas: int) -> None:
    command = [sys.executable, "-c", ARENAS, str(arenas)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 1 <= said.count("<heap nr=") <= arenas, said
