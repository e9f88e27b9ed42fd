"""The commands whose work is trials, records of trials, or a look at this machine, a file each.

pensieve.cli parses what was typed and calls them. Those of a server are in pensieve.serve.server, benchmarks in
pensieve.lab.bench.
"""
