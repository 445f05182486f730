"""Which runner is for prompts, which for the tokens after them, and which for both."""
