"""`python -m weft_cli`, the same as `weft`."""

import sys

from weft_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
