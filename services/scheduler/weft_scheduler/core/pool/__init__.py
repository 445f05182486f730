"""One pool: what is declared of it, what waits in it, its runners, and what its size follows. Each part has a file."""
