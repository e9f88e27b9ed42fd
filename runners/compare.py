"""Two sweeps, or two sets of trials, metric by metric: python runners/compare.py A B. --help says how to name them."""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
