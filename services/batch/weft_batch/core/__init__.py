"""Pure: which line runs next and when a batch ends, what a line of an input file means."""
