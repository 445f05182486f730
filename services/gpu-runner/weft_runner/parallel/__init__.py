"""One model on several ranks: its parts, what ranks tell each other in a layer, the processes that hold them."""
