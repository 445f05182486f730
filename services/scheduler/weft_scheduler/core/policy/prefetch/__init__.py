"""Forecast prefetch: which adapters come to the disks of which runners before a request names them."""
