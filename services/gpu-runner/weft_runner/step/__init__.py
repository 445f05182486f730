"""How steps run: one after the other, the next one launched behind the running one, or several in a pipeline."""
