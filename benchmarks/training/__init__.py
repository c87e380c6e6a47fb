"""Trainings as users start them, each beside the stock one: see users.py."""
