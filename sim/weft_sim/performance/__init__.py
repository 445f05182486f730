"""How long an iteration takes: models of devices and engines, fitted to profiles and to published measurements."""
