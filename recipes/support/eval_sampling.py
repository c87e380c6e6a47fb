"""How evaluations of recipes sample; apart from the evaluation, for a quick `--help`."""

TEMPERATURE, MAX_TOKENS = 0.5, 48
"""Greedy completions of a small model repeat themselves, so that its scores jump up and down."""
DESCRIPTION = f"sampled with temperature {TEMPERATURE}, at most {MAX_TOKENS} new tokens"
"""For `--help`."""
