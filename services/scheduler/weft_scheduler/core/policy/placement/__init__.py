"""The choice of the runner that a request runs on."""
