"""Leadership: which of several processes acts is decided on a `coordination.k8s.io` Lease (ADR 0010, ADR 0024)."""
