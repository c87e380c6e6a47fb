"""Which requests run in the next step, and the step's flat arrays. Integers and NumPy only."""
