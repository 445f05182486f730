"""The scheduler: which runner serves which request. `core` decides, `server` has the streams; no token passes here."""
