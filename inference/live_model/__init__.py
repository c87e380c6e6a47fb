"""Borrowing a model that is being trained, and noticing when its weights change."""
