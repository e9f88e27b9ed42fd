"""The commands whose work is trials, records of trials, or a look at this machine, a file each.

pensieve.cli calls them, with what Hydra composed or for them to parse. Those of a server are in pensieve.serve.server,
benchmarks in pensieve.lab.bench.
"""
