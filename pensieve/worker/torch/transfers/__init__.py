"""Copies of KV blocks between the GPU and the CPU."""
