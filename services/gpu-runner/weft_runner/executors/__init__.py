"""What computes a runner's model: the table of kinds, a module for each, and what serving takes of memory."""
