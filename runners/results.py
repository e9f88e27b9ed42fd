"""What was recorded: list, show, export, reproduce it, or write MLflow from it."""

if __name__ == "__main__":
    from _verb import call

    call(__file__)
