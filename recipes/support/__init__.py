"""Code that the recipes share: arguments, data and model, evaluation, the run folder."""
