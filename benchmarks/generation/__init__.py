"""Workloads, peers and reports of bench_generation."""
