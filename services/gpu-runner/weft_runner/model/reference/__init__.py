"""The reference executor: the model in plain torch, fp32: what the others are compared with."""
