"""Adapters on this runner: who is where, who gets the next device slot, and what is fetched, kept and forgotten."""
