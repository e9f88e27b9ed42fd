"""Eviction policies of ours in vLLM's CPU tier. `chunks` and `options` need no vLLM; `connector` runs inside it.

vLLM's kv_connector_module_path names this package.
"""

from pensieve import from_modules

__getattr__ = from_modules(
    __name__,
    dict.fromkeys(("PensieveConnector", "HostSpec"), "pensieve.plugins.vllm.connector"),
)
