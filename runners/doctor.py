"""What this machine has, which models fit on it, and what to type next: python runners/doctor.py"""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
