"""KEDA and Prometheus beside a control plane of our own, for `make test-long`: real programs, built from Go modules."""
