"""Talk to a model in the terminal: python runners/chat.py [group=option] [chat.script=FILE]. --help lists all fields."""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
