"""Which running requests migrate so that a lightly loaded runner becomes idle."""
