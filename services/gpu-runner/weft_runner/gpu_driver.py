"""How many GPUs the driver of this machine shows a process, asked without torch (280 MB, a second and more)."""

import ctypes
from importlib.util import find_spec


def has_torch() -> bool:
    """Say whether torch is installed."""
    return find_spec("torch") is not None


def count_gpus() -> int:
    """Ask the driver; 0: there is none, or it shows none ($CUDA_VISIBLE_DEVICES)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
    except (OSError, AttributeError):
        return 0


def finds_gpu() -> bool:
    """Say whether a runner that chooses its executor asks torch for a GPU."""
    return has_torch() and count_gpus() > 0
