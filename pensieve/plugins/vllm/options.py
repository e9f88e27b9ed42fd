"""What the connector's configuration says to a policy: its name and fields, and what recomputing a chunk costs."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pensieve.core.policies.base import EvictionPolicy, PolicyContext, as_policy
from pensieve.errors import ConfigError, UnsupportedModel
from pensieve.lab.compose.conf import conf_folder, options
from pensieve.specs import HardwareSpec, ModelSpec

log = logging.getLogger("vllm.pensieve")

TESTED = "0.32."
UNTESTED_ENV = "PENSIEVE_VLLM_UNTESTED"


def refuse_untested(version: str) -> None:
    """Raises ConfigError: the contract of policies changes from version to version of vLLM."""
    if not version.startswith(TESTED) and not os.environ.get(UNTESTED_ENV):
        raise ConfigError(
            f"This vLLM is {version}, and the plug-in is tested with {TESTED}*; test it in a checkout of Pensieve with "
            f"`make vllm-compat VLLM=vllm=={version}`, and set {UNTESTED_ENV}=1 if that passes."
        )


@dataclass(frozen=True, slots=True)
class Tiers:
    """As vLLM reports them. architecture: of the model's configuration. device: the card's name. kv_bytes_per_token: of all
    devices together. block_tokens: of a block, of which a chunk of the CPU tier has blocks_per_chunk."""

    architecture: Mapping[str, Any]
    dtype: str
    device: str
    devices: int
    block_tokens: int
    blocks_per_chunk: int
    device_blocks: int
    chunks: int
    kv_bytes_per_token: int


def policy_maker(name: str, extra: Mapping[str, Any], tiers: Tiers) -> Callable[[], EvictionPolicy]:
    """What makes the policy `name`: of conf/eviction, or module.Class of somebody's own.

    extra: kv_connector_extra_config; of that policy_fields (its parameters), profile (a file of `pensieve profile`), seed.
    Raises ConfigError for a name, a field or a file that cannot be.
    """
    fields, target = {}, name
    if "." not in name:
        if name not in options("eviction"):
            known = ", ".join(options("eviction"))
            raise ConfigError(f"eviction_policy={name!r} is none of {known}, and no module.Class.")
        fields = _read("eviction", name)
        target = fields["_target_"]
    module, _, kind_name = target.rpartition(".")
    kind: Any = getattr(import_module(module), kind_name)
    if getattr(kind, "needs_future", False):
        raise ConfigError(f"eviction_policy={name} reads the future, which only a replay knows; choose another.")
    fields = {key: value for key, value in fields.items() if not key.startswith("_") and key != "name"}
    fields |= extra.get("policy_fields") or {}
    recompute_s, load_s = _costs(extra.get("profile"), tiers)
    context = PolicyContext(
        chunk_tokens=tiers.block_tokens,
        gpu_blocks=tiers.device_blocks,
        cpu_blocks=tiers.chunks * tiers.blocks_per_chunk,
        recompute_s=recompute_s,
        load_s=load_s,
        seed=int(extra.get("seed", 0)),
    )

    def make() -> EvictionPolicy:
        try:
            return as_policy(kind(context, **fields))
        except TypeError as error:
            raise ConfigError(f"policy_fields={fields} do not fit {kind.__name__}: {error}.") from None

    make()  # what it refuses, it refuses now
    return make


def _costs(path: str | None, tiers: Tiers) -> tuple[Callable[[int], float], float]:
    """Seconds to recompute the block that ends at a context, and to load a block. Imports what only one of both needs."""
    block, per_token = tiers.block_tokens, tiers.kv_bytes_per_token
    if path is not None:
        from pensieve.sim.machine_profile import read_profile

        profile = read_profile(path)
        costs, measured = profile.costs, profile.block_bytes // profile.costs.chunk_tokens
        if measured != per_token:
            raise ConfigError(
                f"profile={path} was measured with {profile.where.get('model')} in {profile.where.get('dtype')}: KV has "
                f"{measured} bytes a token there, and {per_token} here; measure one for it."
            )
        share = block / costs.chunk_tokens
        return lambda context_tokens: share * costs.recompute_s(context_tokens), share * costs.load_s()
    from pensieve.sim.roofline import Roofline

    plain = tiers.device.lower().replace(" ", "").replace("-", "")
    cards = {one.removeprefix("sim_").split("_")[0]: one for one in options("hardware")[::-1] if one.startswith("sim_")}
    card = next((option for name, option in cards.items() if name in plain), None)
    if card is None:
        log.info("No rates are known of %s: costs keep their proportions, by those of an A100.", tiers.device)
    rates = _read("hardware", card or cards["a100"])
    known: dict[str, Any] = {
        name: float(rates[name]) for name in ("flops", "memory_bw", "h2d_bw", "compute_efficiency")
    }
    hardware = HardwareSpec(tiers.device, True, gpus=tiers.devices, **known)
    try:
        model = ModelSpec.from_architecture("of vLLM", tiers.architecture, tiers.dtype)
        roofline = Roofline(model, hardware, block)
    except (UnsupportedModel, KeyError) as error:  # a field that is not there, or a dtype
        log.warning("Each chunk is taken to cost the same to recompute, since the model has no roofline: %s", error)
        return lambda context_tokens: 1.0, block * per_token / hardware.h2d_bw
    return roofline.recompute_s, roofline.load_s()


def _read(group: str, name: str) -> dict[str, Any]:
    """An option's fields over those that it builds on. Not by read_option: vLLM's environment has no OmegaConf."""
    import yaml

    own: dict[str, Any] = yaml.safe_load((conf_folder() / group / f"{name}.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for below in own.pop("defaults", ()):
        found |= {} if below == "_self_" else _read(group, below)
    return found | own
