"""The OpenAI API: what is taken, what is refused, and how answers look on the wire."""
