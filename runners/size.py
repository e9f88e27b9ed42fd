"""How much KV cache a load needs, as a map of sizes: python runners/size.py [group=option] [slo.ttft_ms=500]"""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
