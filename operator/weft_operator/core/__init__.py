"""The planner and everything that it decides by. Pure: no event loop, network, clock or Kubernetes client."""
