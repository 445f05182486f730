"""What is true now: runner leases, the memory picture, overruns; and what was: outcomes, usage, keys."""
