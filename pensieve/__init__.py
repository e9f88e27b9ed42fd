"""A laboratory for stateful LLM serving: Pensieve (EuroSys 2025) and its baselines, on real or simulated hardware.

The public names are resolved on first use, so that importing the package imports no torch.
"""

from pensieve.lazy import from_modules

__version__ = "0.1.0"

__all__ = ["Generation", "PensieveError", "Server", "create_server"]
__getattr__ = from_modules(
    __name__,
    {
        "create_server": "pensieve.serve.server.api",
        "Server": "pensieve.serve.server.api",
        "Generation": "pensieve.serve.server.api",
        "PensieveError": "pensieve.errors",
    },
)
