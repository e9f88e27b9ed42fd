"""Read the configuration in conf/, check it, plan a trial by it, and build the objects that it names."""

from pensieve.compose.build import (
    build_outside,
    build_system,
    build_tokenizer,
    build_workload,
    make_workload,
    outside_engine,
)
from pensieve.compose.folder import conf_folder, options, outputs_folder, read_option
from pensieve.compose.plan import TrialPlan, plan_trial
from pensieve.compose.preflight import check_free_memory, preflight
from pensieve.compose.schema import ModelConfig, TrialConfig
from pensieve.compose.settings import check, resolved
from pensieve.compose.weights import model_config

__all__ = [
    "ModelConfig",
    "TrialConfig",
    "TrialPlan",
    "build_outside",
    "build_system",
    "build_tokenizer",
    "build_workload",
    "check",
    "check_free_memory",
    "conf_folder",
    "make_workload",
    "model_config",
    "options",
    "outputs_folder",
    "outside_engine",
    "plan_trial",
    "preflight",
    "read_option",
    "resolved",
]
