"""All that the figures ask of pensieve.results, in one place; the report's pages ask about claims themselves."""

from pensieve.results.fields import axis_value, varying_axes
from pensieve.results.frame import measured_turns
from pensieve.results.headline import REFERENCE
from pensieve.results.mixture import Mixture, mixtures
from pensieve.results.schema import Sweep, SweepTrial, Trial
from pensieve.results.store import JobResult, ResultsStore, open_store

__all__ = [
    "REFERENCE",
    "JobResult",
    "Mixture",
    "ResultsStore",
    "Sweep",
    "SweepTrial",
    "Trial",
    "axis_value",
    "measured_turns",
    "mixtures",
    "open_store",
    "varying_axes",
]
