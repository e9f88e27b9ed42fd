"""All that the figures ask of pensieve.results, in one place; the report asks about verdicts itself."""

from pensieve.results.caveats import offered_rate, starting
from pensieve.results.claims import Claim, read_claims
from pensieve.results.claims.claim import unmet
from pensieve.results.claims.measures import crossing
from pensieve.results.frame import (
    PAPERS,
    PROBES,
    START,
    ByConversation,
    by_conversation,
    by_round,
    conversation_sums,
    conversations_of,
    found_more,
    gap_closed,
    paired,
    positive_ratio,
    speed_up,
    turn_frame,
    values_of,
)
from pensieve.results.headline import REFERENCE, apart
from pensieve.results.prices import Prices, Worth, prefill_seconds
from pensieve.results.schema import Sweep, SweepTrial, Trial
from pensieve.results.size_map import Place, SizeMap, is_map, read_map, spaced
from pensieve.results.store import Holding, JobResult, ResultsStore, open_store
from pensieve.results.trials import Mixture, axis_value, mixtures, varying_axes

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
    "Worth",
    "apart",
    "axis_value",
    "by_conversation",
    "by_round",
    "conversation_sums",
    "conversations_of",
    "crossing",
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
