"""The scenarios whose rows are frozen: trials (overrides of conf/), and scripts that drive one system."""

from collections.abc import Callable
from dataclasses import dataclass

from pensieve.core.request import Fork
from tests.frozen.play import Play, at_random
from tests.frozen.rows import Rows
from tests.frozen.trials import rows_of


@dataclass(frozen=True)
class Trial:
    """wall: a real trial, on a real clock."""

    name: str
    overrides: tuple[str, ...]
    slow: bool = False
    wall: bool = False

    def rows(self) -> Rows:
        return rows_of(self.overrides, self.wall)


@dataclass(frozen=True)
class Served:
    """Conversations over HTTP, one request after the other, edited and branched as a client of an own transcript does it."""

    name: str
    slow: bool = False

    def rows(self) -> Rows:
        from tests.frozen.served import rows

        return rows()


@dataclass(frozen=True)
class Script:
    """worker: one of play.WORKERS."""

    name: str
    overrides: tuple[str, ...]
    script: Callable[[Play], None]
    worker: str = "windows"
    slow: bool = False

    def rows(self) -> Rows:
        play = Play((*TOY, *self.overrides), self.worker)
        self.script(play)
        return play.close()


# -- trials -----------------------------------------------------------------------------------------------------------

CHAT = (
    "model=opt_13b", "hardware=sim_a100_80g", "workload=chat", "workload.conversations=14", "workload.min_turns=3",
    "workload.max_turns=5", "workload.max_new_tokens=24", "workload.pressure=0", "workload.turns_per_s=20",
    "cache.gpu='1024 tokens'", "cache.cpu='1024 tokens'",
)  # fmt: skip
AGENTS = (
    "model=llama3_8b", "hardware=sim_h100", "workload=agents", "workload.agents=8", "workload.act_s=1",
    "cache.gpu='2048 tokens'", "cache.cpu='1024 tokens'",
)  # fmt: skip
CLUSTER = (*CHAT, "hardware.replicas=3")
REAL = (
    "hardware=cpu", "hardware.threads=1", "model.dtype=float32", "trial.exclusive=false", "workload=rounds",
    "workload.rounds=3", "workload.conversations=4", "cache.gpu='512 tokens'", "cache.cpu='512 tokens'",
    "scheduler.copy_ahead=never", "eviction=lru", "attention_backend=reference",
)  # fmt: skip
EVICTION = (
    "belady", "conversation_lru", "fifo", "hinted", "learned_return", "learned_unguarded",
    "lru", "noisy_hint", "oracle_hint", "retention_value",
)  # fmt: skip
BASELINES = ("pensieve", "gpu_only", "stateless", "prefix_cache", "llama_slots")

TRIALS = (
    *(Trial(f"chat {one}", (*CHAT, f"baseline={one}")) for one in BASELINES),
    *(Trial(f"agents {one}", (*AGENTS, f"baseline={one}"), slow=one != "pensieve") for one in BASELINES),
    Trial("chat vllm_offload", (*CHAT, "baseline=vllm_offload", "baseline.cache.order=arc", "cache.cpu='4096 tokens'")),
    Trial("agents vllm_offload", (*AGENTS, "baseline=vllm_offload", "cache.cpu='4096 tokens'")),
    *(Trial(f"eviction {one}", (*AGENTS, f"eviction={one}"), slow=True) for one in EVICTION),
    *(Trial(f"eviction {one} chat", (*CHAT, f"eviction={one}"), slow=True) for one in EVICTION),
    *(
        Trial(f"copy ahead {one}", (*CHAT, f"scheduler.copy_ahead={one}"))
        for one in ("paper", "spare", "never", "auto")
    ),
    *(Trial(f"restore {one}", (*CHAT, f"baseline.cache.restore={one}")) for one in ("hybrid", "recompute")),
    Trial("depth 2", (*CHAT, "hardware.depth=2")),
    Trial("split", (*CHAT, "scheduler=split")),
    Trial("vllm scheduler", (*CHAT, "scheduler=vllm", "baseline=prefix_cache"), slow=True),
    Trial("loads not apart", (*CHAT, "scheduler.load_apart=false", "hardware.pipelined_swap_in=false"), slow=True),
    Trial("fragments", (*CHAT, "hardware.fragment_s=5.9e-6", "baseline.cache.restore=hybrid"), slow=True),
    Trial("timeouts", (*CHAT, "workload.timeout_s=1.5", "workload.turns_per_s=30")),
    Trial(
        "suspensions", (*CHAT, "cache.gpu='928 tokens'", "scheduler.admission_reserve=0", "workload.turns_per_s=200")
    ),
    Trial("forgets", (*CHAT, "cache.session_ttl_s=0.5", "cache.max_remembered_tokens=2000")),
    Trial("warm", (*CHAT, "cache_state=warm"), slow=True),
    Trial("salted", (*CHAT, "cache_state=salted", "baseline=prefix_cache"), slow=True),
    Trial("tensor parallel", (*CHAT, "hardware.gpus=2"), slow=True),
    *(
        Trial(
            f"disk {restore}",
            (
                *CHAT,
                "model=llama2_70b",
                "hardware.gpus=2",
                "cache.disk='8192 tokens'",
                f"baseline.cache.restore={restore}",
            ),
        )
        for restore in ("load", "hybrid")
    ),
    *(
        Trial(f"on {one}", (*CHAT, "model=llama3_8b", f"hardware={one}"), slow=True)
        for one in ("sim_h100", "sim_h200", "sim_a100_80g_pcie", "sim_rtx4090", "sim_rtxpro6000")
    ),
    Trial("on sim_gtx1650", (*CHAT, "model=gpt2", "hardware=sim_gtx1650"), slow=True),
    Trial("prefix invalidation", ("workload=prefix_invalidation", "workload.rounds=2", "cache=cramped")),
    Trial(
        "prefix invalidation shared",
        ("workload=prefix_invalidation", "workload.rounds=2", "cache=cramped", "baseline=prefix_cache"),
    ),
    Trial("decode", ("model=llama3_8b", "workload=decode", "workload.iterations=8", "cache=small"), slow=True),
    Trial(
        "hotness",
        ("model=llama3_8b", "workload=hotness", "cache.gpu='2048 tokens'", "cache.cpu='2048 tokens'"),
        slow=True,
    ),
    *(
        Trial(
            f"rounds {order}",
            ("model=llama3_8b", "workload=rounds", f"workload.order={order}", "workload.at_once=3", "cache=cramped"),
        )
        for order in ("strict", "random")
    ),
    Trial(
        "disaggregated",
        ("model=tiny", "baseline=semantic_blind", "workload=decode", "workload.iterations=8"),
        slow=True,
    ),
    *(
        Trial(f"cluster {router}", (*CLUSTER, f"hardware.router={router}"), slow=router != "prefix_aware")
        for router in ("affinity", "least_loaded", "prefix_aware", "random")
    ),
    *(Trial(f"real {one}", (*REAL, f"baseline={one}"), wall=True, slow=True) for one in BASELINES),
)

# -- scripts ----------------------------------------------------------------------------------------------------------

TOY = (
    "model=tiny", "model.architecture.hidden_size=64", "model.architecture.num_hidden_layers=2", "model.seed=1",
    "model.architecture.head_dim=16", "model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=2",
    "model.architecture.intermediate_size=96", "model.dtype=float32",
    "hardware.terms={projections: roofline, attention: roofline, all_reduce: link}", "hardware.flops=1e8",
    "hardware.memory_bw=1e9", "hardware.h2d_bw=1e6", "hardware.d2h_bw=1e6", "hardware.disk_bw=1e6",
    "hardware.step_overhead_s=1e-4", "cache.chunk_tokens=4", "cache.gpu='80 tokens'", "cache.cpu='80 tokens'",
    "scheduler.max_batch_tokens=16", "scheduler.max_batch_requests=6",
)  # fmt: skip
"""A machine on which computing a chunk takes about as long as copying it."""

PLAYING = {one: (f"baseline={one}",) for one in BASELINES}
PLAYING["llama_slots"] += ("baseline.cache.n_slots=2", "cache.gpu='160 tokens'")

OFFLOAD, REPLIES = ("baseline=vllm_offload",), ("baseline.cache.offload_prompt_only=false",)
DISK = ("cache.disk='160 tokens'", "cache.cpu='40 tokens'")


def holes(play: Play) -> None:
    """A conversation loses leading chunks, then chunks from its middle, and is asked again."""
    for name in "abcdef":
        play.ask(name, 20, 3)
        play.run()
    for name in "afcea":
        play.ask(name, 3, 2)
        play.run()


def edits(play: Play) -> None:
    """Prompts shorter than the history, as long, beside it from the start, and nothing but a longer one."""
    play.ask("a", 24, 6)
    play.run()
    for keep in (20, 30, 0, 7, 13):
        play.ask("a", 5, 3, keep=keep)
        play.run(0.001)
        play.ask("b", 9, 2)
        play.run()


def forks(play: Play) -> None:
    """Children of a conversation at chunk borders and beside them, which take its KV or do not."""
    play.ask("a", 22, 5)
    play.run()
    for number, (tokens, takes) in enumerate(
        [(8, False), (9, False), (27, False), (1, False), (16, True), (12, False)]
    ):
        play.ask(f"child {number}", 4, 3, fork=Fork("a", tokens, takes_kv=takes))
        play.run(0.0 if number % 2 else None)
    play.ask("a", 2, 2)
    play.run()


def shared(play: Play) -> None:
    """One beginning in several conversations of two tenants."""
    for number in range(6):
        play.ask(f"c{number}", 17 + number, 2, text=1, tenant="t" if number % 3 == 2 else "")
        play.run(0.01)
    play.run()


def crowd(play: Play) -> None:
    """More decodes than fit: the youngest are suspended, and one is cancelled while it is."""
    for number in range(6):
        play.ask(f"c{number}", 9, 14)
    for number in reversed(range(6)):
        play.run(0.02)
        if f"c{number}" in play.open:
            play.cancel(f"c{number}", "timeout")
    play.run()


SCRIPTS = {"holes": holes, "edits": edits, "forks": forks, "shared": shared, "crowd": crowd}


def fuzz(
    name: str, seed: int, *overrides: str, worker: str = "windows", slow: bool = False, longest: int = 9
) -> Script:
    return Script(f"random {name}", overrides, at_random(seed, 400, longest=longest), worker, slow)


PLAYED = (
    *(
        Script(f"{name} {one}", PLAYING[one], script)
        for name, script in SCRIPTS.items()
        for one in ("pensieve", "prefix_cache", "llama_slots")
    ),
    *(fuzz(one, 10 + number, *PLAYING[one]) for number, one in enumerate(BASELINES)),
    *(fuzz(f"{one} depth 2", 20 + n, *PLAYING[one], "hardware.depth=2") for n, one in enumerate(BASELINES)),
    *(fuzz(f"{one} stepwise", 10 + n, *PLAYING[one], worker="stepwise") for n, one in enumerate(BASELINES)),
    *(fuzz(f"{one} faulty", 30 + n, *PLAYING[one], worker="faulty") for n, one in enumerate(BASELINES)),
    *(fuzz(f"{one} torch", 40 + n, *PLAYING[one], worker="torch", slow=n > 0) for n, one in enumerate(BASELINES)),
    fuzz("torch depth 2", 50, "hardware.depth=2", worker="torch", slow=True),
    fuzz("torch disk", 51, *DISK, worker="torch", slow=True),
    fuzz("torch hybrid", 52, "baseline.cache.restore=hybrid", worker="torch", slow=True),
    fuzz("disk", 60, *DISK),
    fuzz("disk hybrid", 61, *DISK, "baseline.cache.restore=hybrid"),
    fuzz("disk faulty", 62, *DISK, worker="faulty"),
    fuzz("hybrid", 63, "baseline.cache.restore=hybrid"),
    fuzz("recompute", 64, "baseline.cache.restore=recompute"),
    fuzz("hybrid faulty depth 2", 65, "baseline.cache.restore=hybrid", "hardware.depth=2", worker="faulty"),
    fuzz("split", 66, "scheduler=split"),
    fuzz("spare", 67, "scheduler.copy_ahead=spare", "cache.cpu='32 tokens'"),
    fuzz("never", 68, "scheduler.copy_ahead=never"),
    fuzz("never depth 2", 69, "scheduler.copy_ahead=never", "hardware.depth=2"),
    fuzz("never hybrid", 70, "scheduler.copy_ahead=never", "baseline.cache.restore=hybrid"),
    fuzz("ttl", 71, "cache.session_ttl_s=0.1", "cache.max_remembered_tokens=120"),
    *(
        fuzz(f"suspensions{how}", 75, "scheduler.admission_reserve=0", *overrides, longest=30, worker=worker)
        for how, worker, overrides in (
            ("", "windows", ()),
            (" disk", "windows", DISK),
            (" depth 2", "windows", ("hardware.depth=2",)),
            (" faulty", "faulty", ()),
        )
    ),
    *(
        fuzz(f"{name}{how}", 95, *overrides, worker=worker)
        for name, overrides in (
            ("shared", ("baseline=pensieve_shared",)),
            ("prefix", ("baseline.cache.reuse=prefix",)),
            ("shared prefix", ("baseline=pensieve_shared", "baseline.cache.reuse=prefix")),
        )
        for how, worker in (("", "windows"), (" faulty", "faulty"))
    ),
    fuzz("gated", 72, "scheduler.load_apart=false", "scheduler.admit_beyond_budget=false"),
    *(fuzz(f"eviction {one}", 80, f"eviction={one}") for one in EVICTION),
    *(
        fuzz(f"vllm_offload{how}", 90, *OFFLOAD, *overrides, worker=worker, slow=worker == "torch")
        for how, worker, overrides in (
            ("", "windows", ()),
            (" stepwise", "stepwise", ()),
            (" arc replies depth 2", "windows", ("baseline.cache.order=arc", *REPLIES, "hardware.depth=2")),
            (" by policy faulty", "faulty", ("baseline.cache.order=eviction", *REPLIES)),
            (" torch", "torch", ("baseline.cache.blocks_per_chunk=2", *REPLIES)),
        )
    ),
)

SCENARIOS = {one.name: one for one in (*TRIALS, *PLAYED, Served("served"))}
