"""A proxy that records a server's traffic: python runners/record.py --upstream http://host:8000 --out FILE"""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
