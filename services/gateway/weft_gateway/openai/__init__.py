"""The OpenAI API: which requests are accepted, and the shape of answers."""
