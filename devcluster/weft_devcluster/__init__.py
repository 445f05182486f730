"""A Kubernetes of one's own, built from source: a control plane in seconds (`control_plane`), or a whole node with real
pods (`node`). For `make dev-cluster`, for benchmarks, and for tests that are given no other cluster."""
