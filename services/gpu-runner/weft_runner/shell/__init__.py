"""Sockets, threads and processes around the machine: engine, adapter pool, sessions, depot, supervisor."""
