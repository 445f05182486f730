"""The present state of runners: leases, the memory picture, overruns; and records: outcomes, usage, keys."""
