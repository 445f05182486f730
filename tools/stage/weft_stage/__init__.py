"""What builds stacks, models and runners for tests and benchmarks."""
