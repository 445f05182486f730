"""The same work through other engines, each in a process of its own, beside ours in one run."""
