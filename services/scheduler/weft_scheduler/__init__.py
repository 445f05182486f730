"""The scheduler: who runs where. `core` decides, `server` talks; no tensor and no token passes through here."""
