"""The Kubernetes shell: the planner's actions carried out through the API server, objects watched with kopf."""
