"""Pages that are set aside for a sequence."""
