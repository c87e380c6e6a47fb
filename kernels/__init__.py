"""Triton kernels: tensors in, tensors out; shared by training and generation."""
