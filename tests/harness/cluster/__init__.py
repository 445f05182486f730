"""What tests do with a Kubernetes, whoever runs it (`cluster`), and what they play on it (`fake_kubelet`)."""
