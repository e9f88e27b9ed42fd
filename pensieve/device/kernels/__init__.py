"""Attention backends: one file a way of attending over paged KV, behind one small protocol, chosen at load."""
