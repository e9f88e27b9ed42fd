"""All that the figures ask of pensieve.results, in one place; the report asks about verdicts itself."""

from pensieve.results.caveats import cut_short, offered_rate, starting
from pensieve.results.claims import Claim, read_claims
from pensieve.results.claims.claim import unmet
from pensieve.results.claims.measures.trials import crossing
from pensieve.results.evidence import TrialGroup
from pensieve.results.fields import axis_value, varying_axes
from pensieve.results.frame import (
    PROBES,
    ByConversation,
    by_conversation,
    by_round,
    conversation_sums,
    conversations_of,
    paired,
    positive_ratio,
    speed_up,
    turn_frame,
    values_of,
)
from pensieve.results.gap import PAPERS, START, found_more, gap_closed
from pensieve.results.headline import REFERENCE, apart
from pensieve.results.holding import Worth, prefill_seconds
from pensieve.results.mixture import Mixture, mixtures
from pensieve.results.schema import Sweep, SweepTrial, Trial
from pensieve.results.size_map import Place, Prices, SizeMap, is_map, read_map, spaced
from pensieve.results.store import Holding, JobResult, ResultsStore, open_store

__all__ = [
    "PAPERS",
    "PROBES",
    "REFERENCE",
    "START",
    "ByConversation",
    "Claim",
    "Holding",
    "JobResult",
    "Mixture",
    "Place",
    "Prices",
    "ResultsStore",
    "SizeMap",
    "Sweep",
    "SweepTrial",
    "Trial",
    "TrialGroup",
    "Worth",
    "apart",
    "axis_value",
    "by_conversation",
    "by_round",
    "conversation_sums",
    "conversations_of",
    "crossing",
    "cut_short",
    "found_more",
    "gap_closed",
    "is_map",
    "mixtures",
    "offered_rate",
    "open_store",
    "paired",
    "positive_ratio",
    "prefill_seconds",
    "read_claims",
    "read_map",
    "spaced",
    "speed_up",
    "starting",
    "turn_frame",
    "unmet",
    "values_of",
    "varying_axes",
]
