"""What recorded traffic lost in the cache, why, and what would help (pensieve advise)."""
