"""How steps run: built of batches, and one loop that schedules, launches, completes and accounts for them."""
