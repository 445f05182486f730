"""Length models made from answered prompts, offline. A predictor that serves does not need it."""
