"""How much KV cache a load needs, as a map of sizes (runners/size.py)."""
