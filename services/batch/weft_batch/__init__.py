"""Files and batches of tenants: what is stored, which line runs next, what came of each."""
