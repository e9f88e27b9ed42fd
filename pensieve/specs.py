"""What a model and a machine are, in numbers. Frozen; everything derived is a property."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pensieve.errors import UnsupportedModel
from pensieve.units import ceil_div

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SIXTEEN_BITS = frozenset(name for name, size in DTYPE_BYTES.items() if size == 2)
ROUNDS_APART = (
    "In 16 bits, kept and recomputed KV round differently, so a reply may change where two logits nearly tie. That is no "
    "fault of the cache; model.dtype=float32 compares exactly."
)
"""Said wherever replies of 16-bit models are compared."""

GATED = {
    "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "llama",
    "mistral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
}  # fmt: skip
"""Architectures whose MLP multiplies two projections."""
ROUTED = {
    "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
    "qwen3_next",
}  # fmt: skip
"""Those whose layers have several gated MLPs, of which each token passes a few."""
_COMPRESSED = {"deepseek_v2", "deepseek_v3"}
_WITH_STATES = {"qwen3_next"}
_STATE_BYTES = 4
"""Of a number of a state, in float32 whatever the dtype, as transformers keeps it; what its convolution saw is not."""
PLAIN = {"apertus", "arcee", "gpt2", "gpt_neox", "nemotron", "opt", "phi", "starcoder2"}
"""Those whose MLP has one. Of any other architecture the number of parameters is not known."""
_TIED = {"cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "gpt2", "opt", "smollm3", "starcoder2"}
"""The head is the embedding unless tie_word_embeddings says otherwise."""
_HEAD_DIM = {
    "ernie4_5": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "glm": 128, "glm4": 128, "gpt_oss": 64,
    "minimax_m2": 128, "qwen3": 128, "seed_oss": 128,
}  # fmt: skip
"""Where head_dim is not given; of all others it is hidden_size over num_attention_heads."""
_LEARNED_POSITIONS = {"gpt2", "opt"}
_WINDOW_ON_REQUEST = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
"""No layer has a window unless use_sliding_window says so."""
_FULL_FIRST = {"qwen2", "qwen3"}
"""The first max_window_layers (28) have no window."""
_WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
"""Every n-th layer has no window, where neither layer_types nor sliding_window_pattern says which, as in transformers."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed MLPs of a layer. layers: how many layers have them; the others have the dense MLP.

    active: experts that a token passes. intermediate: of one expert. shared: of what every token passes beside them.
    """

    count: int
    active: int
    intermediate: int
    shared: int
    layers: int

    def touched(self, tokens: int) -> float:
        """Experts of a layer that a batch of so many tokens is expected to read, each token's choice independent and all
        experts alike. Routers that favour some read fewer."""
        return self.count * (1.0 - (1.0 - self.active / self.count) ** tokens)


@dataclass(frozen=True, slots=True)
class Latent:
    """K and V of a token compressed into `rank` numbers, and `rope` of its position, for all heads (multi-head latent
    attention: DeepSeek-V2, section 2.1). nope, value: a head's widths once expanded. query_rank: None for plain queries."""

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int | None

    def parameters(self, hidden: int, heads: int) -> int:
        """Of one layer's projections."""
        queries = heads * (self.nope + self.rope)
        query = hidden * queries if self.query_rank is None else self.query_rank * (hidden + queries)
        expanded = self.rank * heads * (self.nope + self.value)
        return query + hidden * (self.rank + self.rope) + expanded + heads * self.value * hidden


@dataclass(frozen=True, slots=True)
class States:
    """Layers that keep one state a sequence in place of K and V of each token (gated delta net: Yang et al., ICLR 2025).

    layers: how many. heads: of values, each with a matrix of key_dim * value_dim. keys: numbers of all key heads together.
    kernel: positions that the convolution before them sees, its own among them.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    keys: int
    kernel: int

    @property
    def convolved(self) -> int:
        """Channels: queries, keys and values."""
        return 2 * self.keys + self.heads * self.value_dim

    def bytes_of(self, dtype_bytes: int) -> int:
        """What a sequence keeps in all these layers, however long it is."""
        seen = self.convolved * (self.kernel - 1) * dtype_bytes
        return self.layers * (self.heads * self.key_dim * self.value_dim * _STATE_BYTES + seen)

    def parameters(self, hidden: int) -> int:
        """Matrix weights of one layer: queries, keys, values and their gate; two numbers a head; convolution; output."""
        values = self.heads * self.value_dim
        projected = hidden * (self.convolved + values + 2 * self.heads)
        return projected + self.convolved * self.kernel + values * hidden

    @property
    def flops(self) -> int:
        """Of one token in all these layers: it decays the state, reads what it predicts, writes and reads it."""
        return 7 * self.layers * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Sizes in elements unless the name says bytes.

    architecture: the fields of the transformers configuration, so that weights=random needs no download.
    sliding_window: tokens that a windowed layer attends to, its own among them; None for full attention everywhere.
    experts, latent: None for a dense MLP, and for K and V kept as they are. states: None if all layers keep K and V.
    slides: KV that has left its window is not kept, and caches are counted in that of the other layers. Of a model with
    states this is so always.
    """

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    dtype: str = "float32"
    tied_embeddings: bool = False
    sliding_window: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    states: States | None = None
    slides: bool = False
    architecture: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def from_architecture(name: str, architecture: Mapping[str, Any], dtype: str = "float32") -> ModelSpec:
        """Read a transformers configuration (the content of config.json, or conf/model/*.yaml's architecture).

        Raises UnsupportedModel, naming the field, where one that the sizes need is missing or no size, or two disagree.
        """
        a = dict(architecture)

        def size(*names: str) -> int | None:
            key = next((key for key in names if a.get(key) is not None), None)
            if key is None:
                return None
            try:
                value = int(a[key])
            except (TypeError, ValueError, OverflowError):
                value = 0
            if value < 1:
                raise UnsupportedModel(
                    f"model.architecture.{key}={a[key]!r} of model {name} is no size; give a whole number from 1 on."
                )
            return value

        def need(*names: str) -> int:
            value = size(*names)
            if value is None:
                raise UnsupportedModel(
                    f"The architecture of model {name} lacks {names[0]}; add it to its configuration."
                )
            return value

        model_type = str(a.get("model_type", ""))
        hidden, heads = need("hidden_size", "n_embd"), need("num_attention_heads", "n_head")
        kv_heads = size("num_key_value_heads") or heads
        head_dim = size("head_dim") or _HEAD_DIM.get(model_type)
        if heads % kv_heads or (hidden % heads and not head_dim):
            raise UnsupportedModel(
                f"Sizes of model {name} leave a rest: hidden_size={hidden} over num_attention_heads={heads}, or these over "
                f"num_key_value_heads={kv_heads}; change one in model.architecture."
            )
        latent = None
        if model_type in _COMPRESSED:
            latent = Latent(
                rank=need("kv_lora_rank"),
                rope=need("qk_rope_head_dim"),
                nope=need("qk_nope_head_dim"),
                value=need("v_head_dim"),
                query_rank=size("q_lora_rank"),
            )
            head_dim = latent.nope + latent.rope
        layers = need("num_hidden_layers", "n_layer")
        windowed = a.get("use_sliding_window", model_type not in _WINDOW_ON_REQUEST)
        return ModelSpec(
            name=name,
            model_type=model_type,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim or hidden // heads,
            intermediate=size("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
            vocab=need("vocab_size"),
            max_context=need("max_position_embeddings", "n_positions"),
            dtype=dtype,
            tied_embeddings=bool(a.get("tie_word_embeddings", model_type in _TIED)),
            sliding_window=a.get("sliding_window") if windowed else None,
            experts=_routed(a, layers, need) if model_type in ROUTED else None,
            latent=latent,
            states=_states(a, layers, need) if model_type in _WITH_STATES else None,
            slides=model_type in _WITH_STATES,
            architecture=a,
        )

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def windowed_layers(self) -> int:
        """How many layers attend to `sliding_window` tokens only: those that the configuration lists, or all but every
        sliding_window_pattern-th, or all from max_window_layers on, as transformers reads it of each family; of all others
        each."""
        if self.sliding_window is None:
            return 0
        if listed := self.architecture.get("layer_types"):
            return sum(kind == "sliding_attention" for kind in listed)
        if self.model_type in _FULL_FIRST:
            return max(0, self.layers - int(self.architecture.get("max_window_layers", 28)))
        pattern = self.architecture.get("sliding_window_pattern", _WINDOW_PATTERN.get(self.model_type))
        return self.layers - self.layers // pattern if isinstance(pattern, int) and pattern else self.layers

    @property
    def attending_layers(self) -> int:
        """Those that have K and V."""
        return self.layers - (self.states.layers if self.states else 0)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers that have them, or what they are compressed to."""
        if self.latent is not None:
            return self.layers * (self.latent.rank + self.latent.rope) * self.dtype_bytes
        return 2 * self.attending_layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def state_bytes(self) -> int:
        """Of a sequence, however long."""
        return self.states.bytes_of(self.dtype_bytes) if self.states else 0

    @property
    def kept_bytes_per_token(self) -> int:
        """What a cache keeps of a token however long ago it was; and of one in a window, 1 + blocks_beside times that."""
        layers = self.attending_layers
        return self.kv_bytes_per_token // layers * (layers - (self.windowed_layers if self.slides else 0))

    def blocks_beside(self, chunk_tokens: int) -> int:
        """Groups of windowed layers, each as large as all others together: that many blocks more has a chunk in a window
        (vLLM's hybrid cache manager pads the last group too). Of a model with states: blocks that one of them fills."""
        if self.states:
            return ceil_div(self.state_bytes, chunk_tokens * self.kept_bytes_per_token)
        return ceil_div(self.windowed_layers, self.layers - self.windowed_layers) if self.slides else 0

    @property
    def gated(self) -> bool:
        """The MLP multiplies two projections."""
        return self.model_type in GATED | ROUTED

    @property
    def uncounted(self) -> bool:
        """Whether `parameters` is a guess: of this architecture nobody has said what its MLPs are."""
        return self.model_type not in GATED | PLAIN | ROUTED

    @property
    def rotary(self) -> bool:
        return self.model_type not in _LEARNED_POSITIONS

    @property
    def widest_mlp(self) -> int:
        """What a token is at most spread to within a layer."""
        e = self.experts
        return self.intermediate if e is None else max(self.intermediate, e.active * e.intermediate + e.shared)

    @property
    def attention_parameters(self) -> int:
        """Matrix weights of one layer's projections."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden, self.heads)
        queries = 2 if self.states else 1  # and as many numbers that gate what is attended to
        return self.hidden * self.head_dim * ((1 + queries) * self.heads + 2 * self.kv_heads)

    @property
    def mixing_parameters(self) -> int:
        """Matrix weights of all layers but for their MLPs."""
        states = self.states.layers * self.states.parameters(self.hidden) if self.states else 0
        return self.attending_layers * self.attention_parameters + states

    def mlp_parameters(self, intermediate: int) -> int:
        """Matrix weights of an MLP of that width."""
        return self.hidden * intermediate * (3 if self.gated else 2)

    def layers_parameters(self, experts: float) -> float:
        """Matrix weights of all layers with so many experts in each that has any; norms and biases are below 0.1 %."""
        e = self.experts
        if e is None:
            return self.mixing_parameters + self.layers * self.mlp_parameters(self.intermediate)
        routed = self.hidden * e.count + self.mlp_parameters(e.shared) + experts * self.mlp_parameters(e.intermediate)
        dense = (self.layers - e.layers) * self.mlp_parameters(self.intermediate)
        return self.mixing_parameters + dense + e.layers * routed

    @property
    def parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        positions = 0 if self.rotary else self.max_context * self.hidden
        everything = self.layers_parameters(self.experts.count if self.experts else 0)
        return int(everything) + embeddings + positions

    def read_parameters(self, tokens: int) -> float:
        """Matrix weights of all layers that an iteration over so many tokens reads, of experts those that are sent any."""
        return self.layers_parameters(self.experts.touched(tokens) if self.experts else 0)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """Multiply-adds count twice; the head is counted where logits are computed, not here."""
        return 2 * int(self.layers_parameters(self.experts.active if self.experts else 0))

    @property
    def head_flops(self) -> int:
        return 2 * self.vocab * self.hidden

    @property
    def attention_flops_per_pair(self) -> int:
        """The score and the weighted value of one query and one position that it attends to, all layers."""
        value = self.latent.value if self.latent else self.head_dim
        return 2 * self.attending_layers * self.heads * (self.head_dim + value)


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """A machine. Rates per device; a simulated one is run by them, a real one only described.

    terms: where the times of a simulated one come from (projections, attention, all_reduce: a folder of cost/tables, or
    roofline, fitted, link); empty: its roofline.

    flops: dense matrix rate in the model's dtype, FLOP/s. memory_bw: device memory, bytes/s. h2d_bw, d2h_bw: bytes/s.
    *_efficiency: share of the peak that real kernels reach. step_overhead_s: launch and host time of an iteration.
    link_latency_s: of one all-reduce over the link. network_gbps, network_latency_s: between a client and the model of a
    disaggregated baseline, in 10^9 bit/s each way, and one way. multiprocessors: of a device. graph_sizes: batches are padded
    to the sizes that CUDA graphs were captured at, and a prompt's graphs come in pieces, as in vLLM. duplex_penalty: share of
    the rate each direction loses while both run (the paper measured 18-20 %, section 5). fragment_s: of each contiguous piece
    that a copy between the tiers consists of, beside its bytes. pipelined_swap_in: a layer's compute waits for its own part
    of a swap-in, not for all of it (section 4.3.3). profile: the file of a machine that was measured whole
    (cost.machine_profile), in place of all rates. overlaps: copies run beside compute, and not before it.
    """

    name: str
    simulated: bool
    device: str = "auto"
    gpus: int = 1
    flops: float = 0.0
    memory_bw: float = 0.0
    h2d_bw: float = 0.0
    d2h_bw: float = 0.0
    link_bw: float = 0.0
    link_latency_s: float = 0.0
    network_gbps: float | None = None
    network_latency_s: float = 0.0
    multiprocessors: int = 0
    graph_sizes: bool = False
    terms: Mapping[str, str] = field(default_factory=dict)
    gpu_memory_bytes: int = 0
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    step_overhead_s: float = 0.0
    duplex_penalty: float = 0.0
    fragment_s: float = 0.0
    pipelined_swap_in: bool = True
    profile: str | None = None
    overlaps: bool = True

    @property
    def one_memory(self) -> bool:
        """Both tiers of the cache are the same memory: of a CPU, and of the simulation of one that was profiled."""
        if self.simulated:
            return self.profile is not None and not self.overlaps
        return self.device == "cpu"

    def load_parts(self, layers: int) -> int:
        """In how many parts a load to the GPU comes; the compute of each waits for that part alone."""
        return layers if self.pipelined_swap_in else 1


def _routed(a: Mapping[str, Any], layers: int, need: Callable[..., int]) -> Experts:
    """As the families name it; an expert is as wide as the dense MLP where no width of its own is given."""
    width = need("moe_intermediate_size", "intermediate_size")
    shared = a.get("shared_expert_intermediate_size") or (a.get("n_shared_experts") or 0) * width
    dense, step = set(a.get("mlp_only_layers") or ()), a.get("decoder_sparse_step") or 1
    first = a.get("first_k_dense_replace") or 0
    have = sum(index not in dense and (index + 1) % step == 0 for index in range(first, layers))
    count = need("num_local_experts", "num_experts", "n_routed_experts")
    return Experts(count, need("num_experts_per_tok"), width, shared, have)


def _states(a: Mapping[str, Any], layers: int, need: Callable[..., int]) -> States:
    """Every full_attention_interval-th layer attends to everything, where layer_types does not say which do."""
    interval = int(a.get("full_attention_interval") or 4)
    kinds = a.get("layer_types")
    return States(
        layers=kinds.count("linear_attention") if kinds else layers - layers // interval,
        heads=need("linear_num_value_heads"),
        key_dim=need("linear_key_head_dim"),
        value_dim=need("linear_value_head_dim"),
        keys=need("linear_num_key_heads") * need("linear_key_head_dim"),
        kernel=need("linear_conv_kernel_dim"),
    )
