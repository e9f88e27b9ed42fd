"""The tests run the sources as they are; those of what is compiled say so themselves."""

import os

os.environ.setdefault("PENSIEVE_COMPILED", "0")  # before the package is imported
