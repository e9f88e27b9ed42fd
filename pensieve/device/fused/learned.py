"""Models with learned positions, layer norms and a plain MLP: GPT-2 and OPT."""

from __future__ import annotations

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
    if config.activation_function not in ACTIVATIONS:
        return f"activation {config.activation_function}"
    layers = [
        LearnedLayer(
            how=_how(index, config.n_head, block.attn.head_dim, block.attn.scaling),
            norm_1=block.ln_1,
            qkv=Linear([block.attn.c_attn], pack),
            out=Linear([block.attn.c_proj], pack),
            norm_2=block.ln_2,
            up=Linear([block.mlp.c_fc], pack),
            activation=config.activation_function,
            down=Linear([block.mlp.c_proj], pack),
        )
        for index, block in enumerate(body.h)
    ]
    return _model(body.wte, body.wpe, layers, body.ln_f, Linear([module.lm_head], pack), pack)


def build_opt(module: Any, pack: bool) -> FusedModel | str:
    """The fused model of `module`, or why there is none. Raises AttributeError where the module is built otherwise."""
    config, body = module.config, module.model.decoder
    if not config.do_layer_norm_before or body.final_layer_norm is None:
        return "layer norms after the blocks"
    if body.project_in is not None or body.project_out is not None:
        return "projected embeddings"
    if config.activation_function not in ACTIVATIONS:
        return f"activation {config.activation_function}"
    layers = [
        LearnedLayer(
            how=_how(index, config.num_attention_heads, block.self_attn.head_dim, block.self_attn.scaling),
            norm_1=block.self_attn_layer_norm,
            qkv=Linear([block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj], pack),
            out=Linear([block.self_attn.out_proj], pack),
            norm_2=block.final_layer_norm,
            up=Linear([block.fc1], pack),
            activation=config.activation_function,
            down=Linear([block.fc2], pack),
        )
        for index, block in enumerate(body.layers)
    ]
    head = Linear([module.lm_head], pack)
    return _model(body.embed_tokens, body.embed_positions, layers, body.final_layer_norm, head, pack)


def _how(layer: int, heads: int, head_dim: int, scaling: float) -> Attention:
    return Attention(layer, heads, heads, head_dim, Scores(scaling))


def _model(tokens: Any, places: Any, layers: list[LearnedLayer], norm: Any, head: Linear, pack: bool) -> FusedModel:
    """places: the position embeddings; OPT's has an offset before its first."""
    offset = getattr(places, "offset", 0)

    def begin(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return F.embedding(ids, tokens.weight) + F.embedding(positions + offset, places.weight), None, None

    def finish(hidden: torch.Tensor) -> torch.Tensor:
        return head(_normed(norm, hidden))

    return FusedModel(begin, layers, finish, pack)


def _normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
