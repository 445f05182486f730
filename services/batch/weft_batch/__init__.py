"""Files and batches of tenants: storage, the order of lines, and results."""
