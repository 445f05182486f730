"""Batch requests take the room that interactive ones leave, and give it back."""
