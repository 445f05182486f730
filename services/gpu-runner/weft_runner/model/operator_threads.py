"""What code that all executors share asks of torch: nothing, where this process does not compute with it."""

import sys

MAX_OPERATOR_THREADS = 4  # of the reference executor's operators: they do not gain from more


def set_operator_threads(count: int) -> None:
    """Set the threads of torch's operators on the calling thread: idle ones spin for a while, on cores of steps."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def wait_for_devices() -> None:
    """Wait until the GPUs of this process have done what was launched."""
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
