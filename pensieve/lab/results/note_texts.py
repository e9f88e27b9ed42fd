"""What each note says. A note is a code and the values that its text names; notes.py decides which ones apply."""

TEXTS = {
    # Above the table: without these its numbers would be taken for something else.
    "sweep_running": "The sweep is running: {waiting} of {expected} trials have not ended, {lost} did not complete.",
    "none_completed": "None of the {expected} trials completed. Type the same command again to run them.",
    "trials_missing": "{missing} of {expected} trials did not complete. Type the same command again to run them.",
    "do_not_compare": "Do not compare times here: the sweep holds {what}. Remedy: {remedy}.",
    "mostly_lost": "Too few turns completed to compare: {where}.",
    "tokens_are_bytes": "{text}",
    "context_cut": (
        "The model's context cuts the load: {where}. Choose a model with a longer context to ask all of it "
        "(simulated: model.architecture.max_position_embeddings)."
    ),
    # Behind `results.py notes`.
    "turns_without_reply": (
        "Turns that did not complete: {where}. They are in no latency and no hit rate, so what is left may be easier."
    ),
    "near_saturation": (
        "Near saturation: most of the last turn's TTFT is queueing (medians): {where}. Ratios to these grow with the load."
    ),
    "less_finished": "Less of the offered load was finished (requests/s): {where}. Latencies are not at equal rates.",
    "slower_at": "Pensieve is behind (means of trials): {where}.",
    "cache_not_as_declared": "The cache was not as declared: {where}.",
    "cache_not_verified": "Nobody can tell whether the cache was as declared: {where}.",
    "slots_taken": (
        "Slots limit concurrency: {where}. baseline.cache.n_slots sets them (llama.cpp: baseline.engine.n_parallel), and "
        "more slots are smaller."
    ),
    "one_seed": "One seed: intervals are over its conversations, on one machine at one time.",
    "repeated_seed": "One seed ran {times} times: intervals are of this machine, not of other conversations. Add seeds.",
    "few_seeds": "{seeds} seeds: no intervals below {least}. Add seed=0,1,2,3,4.",
    "few_conversations": "Medians rest on {count} conversations; another few would move them below {least}.",
    "few_turns_for_p99": "p99 rests on {count} turns a trial; below {least} it is little but the maximum.",
    "cpu_tier_unused": (
        "{chunks} chunks left the GPU tier and none was read back: nothing here shows what the CPU tier is worth. "
        "Add conversations that return, or raise cache.cpu."
    ),
    "nothing_evicted": (
        "Nothing was evicted: every conversation fitted into the GPU tier. To see eviction, {raised} or {lowered}."
    ),
    "busy_machine": "Other programs used {share:.0%} of the CPU time (at most {most:.0%}): times are longer by it.",
    "cost_model_off": "The cost model that eviction goes by was far from the measurement: {where}.",
    "simulated": "Simulated on {where}: times come from a cost model; hits and misses are those of the real cache.",
    "random_weights": "Random weights: text is meaningless, speed is that of the architecture.",
    "served_by": "{text}",
    "load": "{text}",
    "budgets": "KV budgets in tokens: {where}.",
    "warm_up": "{count} warm-up turns are left out.",
    "window": "Throughput is over all measured turns, with start-up and drain: the load is too small for a window: {where}.",
    "not_steady": "The window began before three mean conversation durations had passed: {where}.",
    "late_warmup": "Warm-up turns were still running when the window began: {where}.",
    "none_in_window": "No turn finished in the window, so there is no throughput: {where}.",
    "few_turns": "Few turns finished in the window: {where}.",
    "halves": "The halves of the window differ by over {limit:.0%} in output tokens: {where}.",
    "drain": "Output tokens after the window, which throughput leaves out, at most: {where}.",
    "not_completed": "Not completed: {where}.",
    "never_begun": "{count} of {expected} trials have not begun.",
    "outputs_differ": (
        "Outputs differ from {reference}'s: {where}. A margin near 0 is a tie; in float32 a larger one is a fault."
    ),
    "rounds_apart": "{text}",
    "outputs_agree": "Outputs of all baselines agree in {turns} of {turns} turns compared{exact}.",
    "outputs_not_compared": "Outputs were not compared everywhere: {where}.",
    "bound": "Offline bound on the hit rate at this capacity, in %: {where}.",
    "gap_closed": "lru to bound, closed: (hits - lru's hits) / (bound - lru's hits), paired by seed and conversation.",
}

ABOVE = (
    "sweep_running", "none_completed", "trials_missing", "do_not_compare", "mostly_lost", "tokens_are_bytes",
    "context_cut",
)  # fmt: skip
"""Codes of the notes that stand above a table, in this order; the others are behind a command."""

FACTS = (
    "simulated", "random_weights", "served_by", "load", "budgets", "warm_up", "outputs_agree", "bound", "gap_closed",
)  # fmt: skip
"""Codes of notes that say what ran, and qualify no number: a table does not count them."""
