"""Logs, metrics and probes, the same in every process. Standard library and prometheus-client only."""
