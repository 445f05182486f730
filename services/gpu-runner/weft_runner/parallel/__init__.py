"""One model on several ranks: its parts, what ranks exchange, and the processes that hold them."""
