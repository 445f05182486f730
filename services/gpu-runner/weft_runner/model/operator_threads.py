"""What code that all executors share asks of torch: nothing, where this process does not compute with it."""

import sys


def set_operator_threads(count: int) -> None:
    """Set how many threads torch's operators use on the calling thread: idle ones spin on cores that steps need."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def wait_for_devices() -> None:
    """Until the GPUs of this process have done what was launched."""
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
