"""The engine as a library, and over HTTP. Names are resolved on first use: a client of one needs nothing of the other."""

from pensieve import from_modules

__all__ = ["Generation", "Server", "Stream", "create_server"]
__getattr__ = from_modules(
    __name__,
    {
        "create_server": "pensieve.serve.server.api",
        "Server": "pensieve.serve.server.api",
        "Stream": "pensieve.serve.server.api",
        "Generation": "pensieve.serve.server.api",
    },
)
