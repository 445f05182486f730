"""The command: `weft up | apply | get | describe | delete | logs | key | status | predictor | bench`."""
