"""The loop around the planner: work queue, rate limit, and the clients of the depot and of the scheduler."""
