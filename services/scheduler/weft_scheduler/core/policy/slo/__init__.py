"""A pool's service level objectives: how many requests met them, and which could not."""
