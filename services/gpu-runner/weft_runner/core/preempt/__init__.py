"""Who loses its place for want of memory, and how."""
