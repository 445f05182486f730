"""Real Kubernetes for tests: a control plane in seconds (`control_plane`), a whole node with real pods (`node`)."""
