"""The scheduler's knowledge of requests, runners and pools. Each class alone writes its fields."""
