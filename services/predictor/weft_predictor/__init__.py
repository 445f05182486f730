"""Predictions of how long an answer will be: calibrated quantiles, learned online, in 0.13 ms and without torch."""
