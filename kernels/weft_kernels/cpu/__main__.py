"""`python -m weft_kernels.cpu`: build the CPU kernels of every level if need be, and print what they can do here.

Run before the tests, so that none of them has to wait for the compiler. Exit code 0 also where there are none: their
tests are skipped.
"""

import logging
import sys

from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
from weft_kernels.cpu.library import load


def main() -> int:
    """Build and print. Returns the exit code: 2 for a $WEFT_CPU_LEVEL that cannot be used."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        library = load(every=True)
    except NativeUnavailable as error:
        sys.stdout.write(f"no CPU kernels: {error.reason}\n")
        return 0
    except LevelUnusable as error:
        sys.stderr.write(f"error: WEFT_CPU_LEVEL: {error}\n")
        return 2
    sys.stdout.write(f"CPU kernels: {library.level} of {', '.join(library.levels)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
