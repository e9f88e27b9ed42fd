"""One trial, or with -m a sweep: python runners/run.py [group=option] [group.field=value] [-m]. --help lists them all."""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
