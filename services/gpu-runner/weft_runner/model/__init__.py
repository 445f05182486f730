"""What the model computes: its description, its weights, the executors and sampling."""
