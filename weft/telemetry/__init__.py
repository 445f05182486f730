"""Logs, metrics, probes and spans, the same in every process. Standard library and prometheus-client only;
`tracing.py` uses OpenTelemetry where it is asked for.

A process that imports this exports no `_created` series: one for each counter and histogram, which nothing reads.
"""

from prometheus_client import disable_created_metrics

disable_created_metrics()
