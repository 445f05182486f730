"""Processes of a test: each ends with it, and with the test run also where that is killed, as those of a cluster do."""

from weft_devcluster.tied import SETPRIV, end, start, started, tied

__all__ = ["SETPRIV", "end", "start", "started", "tied"]
