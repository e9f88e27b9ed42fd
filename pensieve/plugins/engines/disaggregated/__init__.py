"""A model in another process than its client, and what crosses the network between them."""
