"""Plugins that put packs, exact losses and evaluations into the trainers people use."""
