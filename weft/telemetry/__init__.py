"""Logs, metrics and probes, the same in every process. Standard library and prometheus-client only.

A process that imports this exports no `_created` series: one for each counter and histogram, which nothing reads.
"""

from prometheus_client import disable_created_metrics

disable_created_metrics()
