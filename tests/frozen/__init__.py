"""Frozen results: some hundred small trials whose rows must not change while the code is rebuilt. See __main__.py."""
