"""The choice of runners for prompts, for the tokens after them, and for both."""
