"""Benchmarks beside their limits and peers."""
