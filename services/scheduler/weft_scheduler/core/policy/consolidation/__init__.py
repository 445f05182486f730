"""The choice of running requests that migrate so that a lightly loaded runner becomes idle."""
