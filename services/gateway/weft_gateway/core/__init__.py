"""The gateway's pure part: one request's life, stop strings, whole characters. No loop, no socket, no clock."""
