import os
import sys

# The inference thread computes small matrices, beside other services: it has one core unless the environment says more.
for library in ("OPENBLAS", "MKL", "OMP") if sys.argv[1:2] != ["train"] else ():
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

from weft_predictor.main import main  # noqa: E402 (numpy reads the environment when it is imported)

sys.exit(main())
