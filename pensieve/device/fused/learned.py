"""Models with learned positions, layer norms and a plain MLP: GPT-2 and OPT."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pensieve.device.fused.decoder import ACTIVATIONS, Attention, FusedModel, Linear, Step
from pensieve.device.kernels.base import Scores


@dataclass(frozen=True, slots=True)
class LearnedLayer:
    """norm_1 before attention, norm_2 before the MLP: torch's own LayerNorm modules, one kernel each."""

    how: Attention
    norm_1: Any
    qkv: Linear
    out: Linear
    norm_2: Any
    up: Linear
    activation: str
    down: Linear

    def __call__(self, hidden: torch.Tensor, step: Step, wanted: torch.Tensor | None) -> torch.Tensor:
        how = self.how
        qkv = self.qkv(_normed(self.norm_1, hidden)).view(len(hidden), -1, how.head_dim)
        queries, keys, values = qkv.split([how.heads, how.kv_heads, how.kv_heads], dim=1)
        attended = step.attend(how, queries, keys, values)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
        hidden = hidden + self.out(attended)
        grown = ACTIVATIONS[self.activation](self.up(_normed(self.norm_2, hidden)))
        return hidden.add_(self.down(grown))


def build_gpt2(module: Any, pack: bool) -> FusedModel | str:
    """The fused model of `module`, or why there is none. Raises AttributeError where the module is built otherwise."""
    config, body = module.config, module.transformer
    if config.add_cross_attention:
        return "cross-attention"
    parts = (
        (one.attn, one.ln_1, [one.attn.c_attn], one.attn.c_proj, one.ln_2, one.mlp.c_fc, one.mlp.c_proj)
        for one in body.h
    )
    return _model(module, pack, config.n_head, body.wte, body.wpe, parts, body.ln_f)


def build_opt(module: Any, pack: bool) -> FusedModel | str:
    """The fused model of `module`, or why there is none. Raises AttributeError where the module is built otherwise."""
    config, body = module.config, module.model.decoder
    if not config.do_layer_norm_before or body.final_layer_norm is None:
        return "layer norms after the blocks"
    if body.project_in is not None or body.project_out is not None:
        return "projected embeddings"

    def parts_of(block: Any) -> _Parts:
        own = block.self_attn
        qkv = [own.q_proj, own.k_proj, own.v_proj]
        return own, block.self_attn_layer_norm, qkv, own.out_proj, block.final_layer_norm, block.fc1, block.fc2

    tokens, places = body.embed_tokens, body.embed_positions
    heads, parts = config.num_attention_heads, map(parts_of, body.layers)
    return _model(module, pack, heads, tokens, places, parts, body.final_layer_norm)


_Parts = tuple[Any, Any, list[Any], Any, Any, Any, Any]  # attention, norm_1, qkv, out, norm_2, up, down


def _model(
    module: Any, pack: bool, heads: int, tokens: Any, places: Any, parts: Iterable[_Parts], norm: Any
) -> FusedModel | str:
    """places: the position embeddings; OPT's has an offset before its first."""
    activation, offset = module.config.activation_function, getattr(places, "offset", 0)
    if activation not in ACTIVATIONS:
        return f"activation {activation}"

    def layer(index: int, own: Any, norm_1: Any, qkv: list[Any], *others: Any) -> LearnedLayer:
        out, norm_2, up, down = others
        how = Attention(index, heads, heads, own.head_dim, Scores(own.scaling))
        joined, rest = Linear(qkv, pack), [Linear([one], pack) for one in (out, up, down)]
        return LearnedLayer(how, norm_1, joined, rest[0], norm_2, rest[1], activation, rest[2])

    layers = [layer(index, *own) for index, own in enumerate(parts)]
    head = Linear([module.lm_head], pack)

    def begin(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return F.embedding(ids, tokens.weight) + F.embedding(positions + offset, places.weight), None, None

    def finish(hidden: torch.Tensor) -> torch.Tensor:
        return head(_normed(norm, hidden))

    return FusedModel(begin, layers, finish, pack)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
