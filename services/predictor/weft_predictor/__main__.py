import os
import sys

from weft.process import long_lived_imports


def start() -> int:
    """The inference thread computes small matrices beside other services: one core unless the environment says more."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    with long_lived_imports():
        from weft_predictor.main import main  # numpy reads the environment when it is imported

    return main()


sys.exit(start())
