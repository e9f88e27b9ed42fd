"""A server with the API of OpenAI: python runners/serve.py [group=option] [serve.port=8000]. --help lists all fields."""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
