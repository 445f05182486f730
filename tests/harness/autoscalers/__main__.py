"""`make autoscalers`: build what is not there."""

import sys

from harness.autoscalers import programs
from weft_devcluster.errors import ClusterError

if __name__ == "__main__":
    try:
        programs.build_all()
    except ClusterError as error:
        sys.exit(f"error: {error}")
