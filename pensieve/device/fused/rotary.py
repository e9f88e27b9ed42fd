"""Models with rotary positions, RMS norms and a gated MLP: Llama, Mistral, Qwen 2 and 3, Gemma 2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pensieve.device.fused.decoder import ACTIVATIONS, Attention, FusedModel, Linear, Step
from pensieve.device.fused.few_rows import RowKernels
from pensieve.device.kernels.base import Scores


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
class RotaryLayer:
    """head_norm: Qwen 3's, over the head_dim of queries and keys. after_*: Gemma 2's, on what is added to the stream.
    kernels: what rotates and gates in C; None where torch does."""

    how: Attention
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

    def __call__(self, hidden: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        how = self.how
        qkv = self.qkv(self.before_attention(hidden)).view(len(hidden), -1, how.head_dim)
        queries, keys, values = self._rotated(qkv, step)
        attended = step.attend(how, queries, keys, values)
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
        return ACTIVATIONS[self.activation](gate).mul_(up)

    def _rotated(self, qkv: torch.Tensor, step: Step) -> Sequence[torch.Tensor]:
        """Queries, keys and values. One rotation for queries and keys: x * cos + (x with its halves exchanged) * (sin,
        negative in the first half)."""
        how = self.how
        both, parts = how.heads + how.kv_heads, [how.heads, how.kv_heads, how.kv_heads]
        assert step.cos is not None and step.sin is not None
        if self.kernels is not None and self.head_norm is None:
            self.kernels.rotate(qkv, both, step.cos, step.sin)
            return qkv.split(parts, dim=1)
        qk, values = qkv.split([both, how.kv_heads], dim=1)
        if self.head_norm is not None:
            qk = self.head_norm(qk)
        qk = (qk * step.cos).addcmul_(qk.roll(how.head_dim // 2, -1), step.sin)
        return (*qk.split(parts[:2], dim=1), values)


def build_rotary(module: Any, pack: bool) -> FusedModel | str:
    """The fused model of `module`, or why there is none. Raises AttributeError where the module is built otherwise."""
    config, body = module.config, module.model
    gemma = config.model_type == "gemma2"
    activation = config.hidden_activation if gemma else config.hidden_act
    if activation not in ACTIVATIONS:
        return f"activation {activation}"

    kernels = RowKernels(module.dtype) if pack else None

    def norm(rms: Any) -> Norm:
        if gemma:  # kept as what is added to 1, of which 16 bits would leave little
            return Norm(rms.weight.detach().float() + 1, rms.eps, kernels)
        weight = rms.weight.detach()
        return Norm(weight if kernels is None else weight.float(), rms.variance_epsilon, kernels)

    def layer(index: int, block: Any) -> RotaryLayer:
        attention, mlp = block.self_attn, block.mlp
        how = Attention(
            layer=index,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            # Mistral's window is the same for all layers and only in the configuration; Llama has none.
            scores=Scores(
                attention.scaling,
                getattr(config if config.model_type == "mistral" else attention, "sliding_window", None),
                attention.attn_logit_softcapping if gemma else None,
            ),
        )
        head_norm = None
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            each = torch.cat([q.expand(how.heads, -1), k.expand(how.kv_heads, -1)])
            head_norm = Norm(each, attention.q_norm.variance_epsilon)
        return RotaryLayer(
            how=how,
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

    last_norm, head = norm(body.norm), Linear([module.lm_head], pack)
    final_softcap = config.final_logit_softcapping if gemma else None

    def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (x[0, :, None] for x in body.rotary_emb(body.embed_tokens.weight[:1], positions[None]))
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat([-first, second], dim=-1)

    known = angles if kernels is None else _Remembered(angles, config.max_position_embeddings)

    def begin(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = body.embed_tokens(ids)  # Gemma 2's scales too
        return (hidden, *known(positions))

    def finish(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(last_norm(hidden))
        return logits if final_softcap is None else torch.tanh(logits / final_softcap) * final_softcap

    layers = [layer(index, block) for index, block in enumerate(body.layers)]
    return FusedModel(begin, layers, finish, pack)


class _Remembered:
    """Angles of all positions up to the furthest that was asked for, and as many again within the model's context: made once,
    then looked up. On a CPU, where nothing waits for a position to be read. A position's angles do not depend on the
    others: rope types that look at the length (dynamic, longrope) are refused when a model is loaded."""

    def __init__(self, angles: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], context: int) -> None:
        """context: positions that the model is made for."""
        self._angles, self._context = angles, context
        self._known = 0
        self._cos = self._sin = torch.empty(0)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [rows, 1, head_dim]."""
        furthest = int(positions.max())
        if furthest >= self._known:
            self._known = max(furthest + 1, min(2 * (furthest + 1), self._context))
            self._cos, self._sin = (x.contiguous() for x in self._angles(torch.arange(self._known)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
