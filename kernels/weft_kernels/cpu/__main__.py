"""`python -m weft_kernels.cpu [--here]`: build the CPU kernels if need be, and print what they can do here.

Run once after an installation from a checkout, so that the first runner does not have to wait for the compiler.
`--here`: the best level of this machine alone, in half of the time. Exit
code 0 also where they cannot be built: then the reference executor serves, and this says why.
"""

import sys

from weft_kernels.cpu.errors import LevelUnusable, NativeUnavailable
from weft_kernels.cpu.library import load


def main(argv: list[str]) -> int:
    """Returns the exit code: 2 for a $WEFT_CPU_LEVEL that cannot be used."""
    try:
        library = load(here="--here" in argv)
    except NativeUnavailable as error:
        sys.stdout.write(f"no CPU kernels: {error.reason}\nthe reference executor will serve, several times slower\n")
        return 0
    except LevelUnusable as error:
        sys.stderr.write(f"error: WEFT_CPU_LEVEL: {error}\n")
        return 2
    sys.stdout.write(f"CPU kernels: {library.level} of {', '.join(library.levels)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
