"""Benchmarks beside their limits and peers: python runners/bench.py target=all. --help lists all."""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
