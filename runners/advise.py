"""What recorded traffic lost in the cache, and what would help: python runners/advise.py FILE [group=option]"""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
