"""What the recipes share: arguments, data and model, the run directory."""
