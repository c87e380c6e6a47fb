"""Kernels behind one signature, chosen at run time from what is installed."""
