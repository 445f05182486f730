"""Pages of earlier prompts, read instead of computed."""
