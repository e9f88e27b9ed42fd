"""Models with rotary positions, RMS norms and a gated MLP (Llama, Mistral, Qwen 2 and 3, Gemma 2) in few, large operations.

transformers' modules spend much of a decode step on dispatch. Here the projections that read one input are one product, a
norm is one kernel, rotary angles are made once a batch, and the last layer's MLP runs for the sampled rows only. The weights
are the transformers module's, which stays usable and is what the self-check compares with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pensieve.device.attention import Iteration, attend
from pensieve.device.fused.packed import FEW_ROWS, Linear, RowKernels
from pensieve.device.kernels.base import Scores

_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "gemma2"}
_gelu_tanh = partial(F.gelu, approximate="tanh")  # one kernel; transformers' gelu_new takes eight
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_new": _gelu_tanh, "gelu_pytorch_tanh": _gelu_tanh,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension; weight of that size, or of any shape that broadcasts to x. A weight in float32 over
    an x in 16 bits is applied before the result is rounded. kernels: what does it in C, with a weight in float32."""

    weight: torch.Tensor
    eps: float
    kernels: RowKernels | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        if self.weight.dtype != x.dtype:
            return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), None, self.eps).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """head_norm: Qwen 3's, over the head_dim of queries and keys. after_*: Gemma 2's, on what is added to the stream.
    kernels: what rotates and gates in C; None where torch does."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scores: Scores
    kernels: RowKernels | None
    before_attention: Norm
    qkv: Linear
    head_norm: Norm | None
    out: Linear
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Linear
    activation: str
    down: Linear
    after_mlp: Norm | None

    def __call__(
        self,
        iteration: Iteration,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """hidden [rows, hidden] to the same shape, or to rows `wanted` only; cos, sin [rows, 1, head_dim]. May write to
        `hidden`."""
        qkv = self.qkv(self.before_attention(hidden)).view(len(hidden), -1, self.head_dim)
        queries, keys, values = self._rotated(qkv, cos, sin)
        attended = attend(iteration, self.index, queries, keys, values, self.scores).reshape(len(queries), -1)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        attended = self.out(attended)
        hidden = hidden + (attended if self.after_attention is None else self.after_attention(attended))
        added = self.down(self._gated(self.gate_up(self.before_mlp(hidden))))
        return hidden.add_(added if self.after_mlp is None else self.after_mlp(added))

    def _gated(self, both: torch.Tensor) -> torch.Tensor:
        if self.kernels is not None and self.activation == "silu":
            return self.kernels.gate(both)
        gate, up = both.chunk(2, dim=-1)
        return _ACTIVATIONS[self.activation](gate).mul_(up)

    def _rotated(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Sequence[torch.Tensor]:
        """Queries, keys and values. One rotation for queries and keys: x * cos + (x with its halves exchanged) * (sin,
        negative in the first half)."""
        both, parts = self.heads + self.kv_heads, [self.heads, self.kv_heads, self.kv_heads]
        if self.kernels is not None and self.head_norm is None:
            self.kernels.rotate(qkv, both, cos, sin)
            return qkv.split(parts, dim=1)
        qk, values = qkv.split([both, self.kv_heads], dim=1)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = (qk * cos).addcmul_(qk.roll(self.head_dim // 2, -1), sin)
        return (*qk.split(parts[:2], dim=1), values)


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A Forward of few, large operations. body: transformers', whose embedding (Gemma 2's scales too) and angles serve.

    With packed weights a decoded row's bits are the same alone and in every batch of up to 4 rows, which are
    multiplied in C; and the same in larger batches, which are packed, however many of their rows are sampled (tested with
    5 to 12). Between the two they differ by rounding.
    """

    body: Any
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    softcap: float | None
    packed: bool

    @property
    def name(self) -> str:
        return "fused, packed weights, few rows in C" if self.packed else "fused"

    def __call__(self, iteration: Iteration, wanted: torch.Tensor) -> torch.Tensor:
        ids, positions = iteration.batch.token_ids, iteration.batch.positions
        tokens, outputs = len(ids), len(wanted)
        if self.packed and tokens > FEW_ROWS and outputs:  # few sampled rows of many are products of packed weights too
            wanted = F.pad(wanted, (0, max(0, FEW_ROWS + 1 - outputs)))
        hidden = self.body.embed_tokens(ids)
        cos, sin = (x[0, :, None] for x in self.body.rotary_emb(hidden[:1], positions[None]))
        first, second = sin.chunk(2, dim=-1)
        sin = torch.cat([-first, second], dim=-1)
        # Where not all rows are sampled, the last layer's output projection and MLP are for those alone.
        some = wanted if len(wanted) < tokens else None
        for layer in self.layers:
            hidden = layer(iteration, hidden, cos, sin, some if layer is self.layers[-1] else None)
        if some is None and outputs != tokens:
            hidden = hidden[wanted]
        logits = self.head(self.norm(hidden))[:outputs]
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def build_fused(module: Any, pack: bool) -> FusedModel | str:
    """The fused forward of a loaded transformers model, or in a few words why it has none.

    pack: copy the weights into oneDNN's layout and do in C what is faster there, where `packable` says so. The module's
    joined parameters become views. Raises EngineMissing where it is asked for and no compiler is here.
    """
    family = module.config.model_type
    if family not in _FAMILIES:
        return f"none for {family}"
    if getattr(module, "is_quantized", False):
        return "quantized weights"
    try:
        return _built(module, pack)
    except AttributeError as error:  # another version of transformers, in which the modules have other parts
        return f"modules of another make: {error}"


def _built(module: Any, pack: bool) -> FusedModel | str:
    config, body = module.config, module.model
    gemma = config.model_type == "gemma2"
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation not in _ACTIVATIONS:
        return f"activation {activation}"
    kernels = RowKernels(module.dtype) if pack else None

    def norm(rms: Any) -> Norm:
        if gemma:  # kept as what is added to 1, of which 16 bits would leave little
            return Norm(rms.weight.detach().float() + 1, rms.eps, kernels)
        weight = rms.weight.detach()
        return Norm(weight if kernels is None else weight.float(), rms.variance_epsilon, kernels)

    def layer(index: int, block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        heads, kv_heads, head_norm = config.num_attention_heads, config.num_key_value_heads, None
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            each = torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)])
            head_norm = Norm(each, attention.q_norm.variance_epsilon)
        # Mistral's window is the same for all layers and only in the configuration; Llama has none.
        window = getattr(config if config.model_type == "mistral" else attention, "sliding_window", None)
        return Layer(
            index=index,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            scores=Scores(attention.scaling, window, attention.attn_logit_softcapping if gemma else None),
            kernels=kernels,
            before_attention=norm(block.input_layernorm),
            qkv=Linear([attention.q_proj, attention.k_proj, attention.v_proj], pack),
            head_norm=head_norm,
            out=Linear([attention.o_proj], pack),
            after_attention=norm(block.post_attention_layernorm) if gemma else None,
            before_mlp=norm(block.pre_feedforward_layernorm if gemma else block.post_attention_layernorm),
            gate_up=Linear([mlp.gate_proj, mlp.up_proj], pack),
            activation=activation,
            down=Linear([mlp.down_proj], pack),
            after_mlp=norm(block.post_feedforward_layernorm) if gemma else None,
        )

    layers = [layer(index, block) for index, block in enumerate(body.layers)]
    softcap = config.final_logit_softcapping if gemma else None
    return FusedModel(body, layers, norm(body.norm), Linear([module.lm_head], pack), softcap, pack)
