"""Fused kernels for generation, verified against the model's own layers."""
