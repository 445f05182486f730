import os
import sys

from weft.process import long_lived_imports


def start() -> int:
    """Run the process with one core for its small matrices, which are computed beside other services, unless the
    environment says more."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    with long_lived_imports():
        from weft_predictor.main import main  # numpy reads the environment when it is imported

    return main()


sys.exit(start())
