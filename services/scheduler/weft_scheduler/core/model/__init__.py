"""What the scheduler knows of requests, runners and pools. Each class alone writes its fields."""
