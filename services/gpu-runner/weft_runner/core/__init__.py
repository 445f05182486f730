"""Decisions of the runner on host integers: no clock, no thread, no tensor."""
