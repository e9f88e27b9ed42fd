"""How a server serves: the node `serve` of conf/serve.yaml, checked; and who its clients are."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pensieve.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
OPERATOR = "operator"
"""The tenant that may read /metrics, where there are several."""


class ServeSettings(BaseModel):
    """keys_env: name of the environment variable with the clients' keys. temperature: see Server.sampling.

    max_*: limits of each tenant; max_queue and max_connections are of all together. receive_s: how long a client may take to
    send a request. record: the file of recorded traffic; true: traffic.parquet in the outputs folder. state: where
    conversations outlive the server: auto (in the outputs folder, if no other server keeps its own there), off, or a file.
    replicas: one is in this process, several are actors of Ray; router: which of them serves a turn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    keys_env: str = "PENSIEVE_API_KEYS"
    max_new_tokens: Positive = 512
    temperature: Annotated[float, Field(ge=0)] | None = None
    max_body_bytes: Positive = 4_000_000
    max_connections: Positive = 512
    receive_s: Seconds = 30.0
    max_queue: Positive = 256
    max_sessions: Positive = 10_000
    max_stored_tokens: Positive = 50_000_000
    keep_alive_s: Seconds | None = 86_400.0
    drain_s: Seconds = 30.0
    state: str | Literal[False] = "off"
    record: str | bool = False
    page: bool = True
    replicas: Positive = 1
    router: Literal["affinity", "affinity_bounded", "least_loaded", "prefix_aware", "random"] = "affinity"


class Tenants:
    """Whose key it is. Without keys there is one tenant, and no key is asked for."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        """keys: tenant by key."""
        self._tenants = {_digest(key): tenant for key, tenant in (keys or {}).items()}

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def of(self, key: str) -> str | None:
        """The tenant; None: nobody's key. Digests are compared, so the time it takes says nothing of a key."""
        return self._tenants.get(_digest(key)) if self._tenants else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def tenants_of(settings: ServeSettings) -> Tenants:
    """From the environment: `tenant:key` with commas between, or keys alone. Raises ConfigError where an address beyond this
    machine would be served without keys."""
    text = os.environ.get(settings.keys_env, "")
    keys: dict[str, str] = {}
    for number, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
        tenant, separator, key = entry.partition(":")
        tenant, key = (tenant, key) if separator else (f"key{number}", entry)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", tenant) or len(key) < 8:
            raise ConfigError(
                f"{settings.keys_env} holds an entry that is no tenant:key. A tenant has letters, digits, - and _; a key has "
                "at least 8 characters (for example: openssl rand -hex 16)."
            )
        if key in keys:
            raise ConfigError(f"{settings.keys_env} gives the same key to {keys[key]} and {tenant}.")
        keys[key] = tenant
    if not keys and not _loopback(settings.host):
        raise ConfigError(
            f"serve.host={settings.host} can be reached from other machines, so clients need a key: "
            f"export {settings.keys_env}=alice:$(openssl rand -hex 16), or leave serve.host=127.0.0.1."
        )
    return Tenants(keys)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
