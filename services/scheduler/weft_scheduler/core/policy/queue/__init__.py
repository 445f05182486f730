"""The order in which waiting requests are offered to the placement."""
