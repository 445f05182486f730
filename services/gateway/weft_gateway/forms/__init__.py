"""Forms of answers: calls of tools, reasoning and structured output, chosen once a request and read by one reader."""
