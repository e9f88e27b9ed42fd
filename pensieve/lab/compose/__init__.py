"""Read the configuration in conf/, check it, plan a trial by it, and build the objects that it names.

The public names are resolved on first use: where conf/ is does not need what builds a system.
"""

from typing import TYPE_CHECKING

from pensieve.lazy import from_modules

if TYPE_CHECKING:
    from pensieve.lab.compose.build import (
        build_cluster,
        build_outside,
        build_simulated,
        build_system,
        build_workload,
        make_workload,
        model_is_loaded,
        outside_engine,
    )
    from pensieve.lab.compose.folder import conf_folder, options, outputs_folder, read_option
    from pensieve.lab.compose.plan import TrialPlan, plan_trial
    from pensieve.lab.compose.preflight import check_free_memory
    from pensieve.lab.compose.schema import ModelConfig, TrialConfig
    from pensieve.lab.compose.settings import check, resolved
    from pensieve.lab.compose.tokenizer import build_tokenizer
    from pensieve.lab.compose.weights import model_config

_NAMES = {
    "build": (
        "build_cluster",
        "build_outside",
        "build_simulated",
        "build_system",
        "build_workload",
        "make_workload",
        "model_is_loaded",
        "outside_engine",
    ),
    "folder": ("conf_folder", "options", "outputs_folder", "read_option"),
    "plan": ("TrialPlan", "plan_trial"),
    "preflight": ("check_free_memory",),
    "schema": ("ModelConfig", "TrialConfig"),
    "settings": ("check", "resolved"),
    "tokenizer": ("build_tokenizer",),
    "weights": ("model_config",),
}
__getattr__ = from_modules(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
)

__all__ = [
    "ModelConfig",
    "TrialConfig",
    "TrialPlan",
    "build_cluster",
    "build_outside",
    "build_simulated",
    "build_system",
    "build_tokenizer",
    "build_workload",
    "check",
    "check_free_memory",
    "conf_folder",
    "make_workload",
    "model_config",
    "model_is_loaded",
    "options",
    "outputs_folder",
    "outside_engine",
    "plan_trial",
    "read_option",
    "resolved",
]
