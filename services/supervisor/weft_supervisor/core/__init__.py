"""Pure: events in, effects out; the clock is an argument (seconds, monotonic)."""
