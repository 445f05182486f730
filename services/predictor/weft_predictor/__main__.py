import os
import sys

from weft.process import long_lived_imports


def start() -> int:
    """Run the process with a single core for its small matrices, unless the environment says more. Other services need
    the remaining cores."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    with long_lived_imports():
        from weft_predictor.main import main  # numpy reads the environment when it is imported

    return main()


sys.exit(start())
