"""Read the configuration in conf/, check it, plan a trial by it, and build the objects that it names.

The public names are resolved on first use: where conf/ is does not need what builds a system.
"""

from typing import TYPE_CHECKING

from pensieve.lazy import from_modules

if TYPE_CHECKING:
    from pensieve.lab.compose.build import build_cluster as build_cluster
    from pensieve.lab.compose.build import build_outside as build_outside
    from pensieve.lab.compose.build import build_simulated as build_simulated
    from pensieve.lab.compose.build import build_system as build_system
    from pensieve.lab.compose.build import build_workload as build_workload
    from pensieve.lab.compose.build import make_workload as make_workload
    from pensieve.lab.compose.build import model_is_loaded as model_is_loaded
    from pensieve.lab.compose.build import outside_engine as outside_engine
    from pensieve.lab.compose.build import what_starts as what_starts
    from pensieve.lab.compose.folder import conf_folder as conf_folder
    from pensieve.lab.compose.folder import options as options
    from pensieve.lab.compose.folder import outputs_folder as outputs_folder
    from pensieve.lab.compose.folder import read_option as read_option
    from pensieve.lab.compose.plan import TrialPlan as TrialPlan
    from pensieve.lab.compose.plan import plan_trial as plan_trial
    from pensieve.lab.compose.preflight import check_free_memory as check_free_memory
    from pensieve.lab.compose.schema import ModelConfig as ModelConfig
    from pensieve.lab.compose.schema import TrialConfig as TrialConfig
    from pensieve.lab.compose.settings import check as check
    from pensieve.lab.compose.settings import resolved as resolved
    from pensieve.lab.compose.tokenizer import build_tokenizer as build_tokenizer
    from pensieve.lab.compose.weights import model_config as model_config

_NAMES = {
    "build": "build_cluster build_outside build_simulated build_system build_workload make_workload model_is_loaded "
    "outside_engine what_starts",
    "folder": "conf_folder options outputs_folder read_option",
    "plan": "TrialPlan plan_trial",
    "preflight": "check_free_memory",
    "schema": "ModelConfig TrialConfig",
    "settings": "check resolved",
    "tokenizer": "build_tokenizer",
    "weights": "model_config",
}
__getattr__ = from_modules(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
)
