"""The GPUs that the driver of this machine shows a process, asked without torch (280 MB, a second and more)."""

import ctypes
from importlib.util import find_spec

NO_GPU = "there is no GPU"
NO_TORCH = "torch is not installed: pip install 'weft[torch]'"


def has_torch() -> bool:
    """Say whether torch is installed."""
    return find_spec("torch") is not None


def gpu_bytes() -> list[int]:
    """Ask the driver for the memory of each GPU; none: there is no driver, or it shows none ($CUDA_VISIBLE_DEVICES)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count, device, n_bytes, versions = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_size_t(0), list[int]()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return []
        for at in range(count.value):
            is_present = not driver.cuDeviceGet(ctypes.byref(device), at)
            is_present = is_present and not driver.cuDeviceTotalMem_v2(ctypes.byref(n_bytes), device)
            versions.append(n_bytes.value if is_present else 0)
    except (OSError, AttributeError):
        return []
    return versions


def finds_gpu() -> bool:
    """Say whether a runner that chooses its executor asks torch for a GPU."""
    return has_torch() and bool(gpu_bytes())
