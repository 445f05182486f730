"""What the operator's tests run against a real API server."""
