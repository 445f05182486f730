"""The number of runners that a pool wants, and the choice of those that should go."""
