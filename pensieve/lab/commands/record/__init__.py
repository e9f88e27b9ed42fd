"""pensieve record: a proxy that records what goes by, or a file of recorded requests made into recorded traffic."""
