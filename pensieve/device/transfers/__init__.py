"""Copies of KV blocks between the GPU tier and the CPU tier."""
