"""Samples or packs to the batch that a training step eats."""
