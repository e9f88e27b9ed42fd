"""Measure this machine, for its cost model and to simulate it: python runners/profile.py [group=option] [profile.to=FILE]"""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
