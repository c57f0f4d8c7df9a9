"""Multi-head latent attention (arXiv 2412.19437 §2.1.1): low-rank queries, one latent and one rotated key a token.

    c_Q = norm(W_DQ h)      [q_C; q_R] = W_UQ c_Q           q_R rotated per head
    c_KV = norm(W_DKV h)    [k_C; v]   = W_UKV c_KV         k_R = RoPE(W_KR h), one for all heads
    o = softmax(scale · [q_C; q_R] [k_C; k_R]ᵀ) v           u = W_O o

With a cache only c_KV and k_R are kept, and W_UKV is absorbed: q_C k_C = (W_UKᵀ q_C) c_KV.
"""

from dataclasses import dataclass

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.attention_core import attention_core
from dstrain.model.rope import Rotary, softmax_scale
from dstrain.precision.linear import Linear
from dstrain.precision.pointwise import RMSNorm
from dstrain.precision.policy import at_least_fp32


LATENT_EPS = 1e-6  # of the two norms inside attention: released code gives them none of the config's rms_norm_eps


@dataclass
class AttentionContext:
    """What attention needs besides the hidden state, the same for every layer of a micro-batch."""

    rotary: Rotary
    starts: torch.Tensor | None = None  # int64 [B, L], see attention_core
    lengths: torch.Tensor | None = None  # with a cache: tokens of each sequence that it already holds, int64 [B]


class LatentCache:
    """Per token the normalised latent [kv_lora_rank] and the rotated key [qk_rope_head_dim] of one layer."""

    def __init__(self, config: ModelConfig, sequences: int, capacity: int, dtype: torch.dtype, device: torch.device):
        self.latent = torch.zeros(sequences, capacity, config.kv_lora_rank, dtype=dtype, device=device)
        self.rope_key = torch.zeros(sequences, capacity, config.qk_rope_head_dim, dtype=dtype, device=device)

    def append(self, latent: torch.Tensor, rope_key: torch.Tensor, lengths: torch.Tensor) -> None:
        """Write L new tokens of each sequence behind its first `lengths`."""
        places = lengths.unsqueeze(-1) + torch.arange(latent.shape[1], device=latent.device)
        rows = torch.arange(latent.shape[0], device=latent.device).unsqueeze(-1)
        self.latent[rows, places] = latent
        self.rope_key[rows, places] = rope_key


class Attention(nn.Module):
    """MLA; without q_lora_rank the query comes from one plain projection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.config, self.heads = config, config.num_attention_heads
        self.scale = softmax_scale(config)
        hidden, q_out = config.hidden_size, self.heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, q_out, dtype)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, dtype)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, dtype)
            self.q_b_proj = Linear(config.q_lora_rank, q_out, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, dtype)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, dtype)
        kv_out = self.heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(config.kv_lora_rank, kv_out, dtype)
        self.o_proj = Linear(self.heads * config.v_head_dim, hidden, dtype)

    def forward(self, x: torch.Tensor, context: AttentionContext, cache: LatentCache | None = None) -> torch.Tensor:
        """x [B, L, hidden] (normalised) -> [B, L, hidden]."""
        q_nope, q_rope = self._query(x, context.rotary)
        latent, rope_key = self._latent(x, context.rotary)
        if cache is None:
            out = self._attend(q_nope, q_rope, latent, rope_key, context.starts)
        else:
            cache.append(latent, rope_key, context.lengths)
            out = self._attend_absorbed(q_nope, q_rope, cache, context.lengths)
        return self.o_proj(out.flatten(-2))

    def _query(self, x, rotary):
        """-> the parts without and with position, [B, L, H, qk_nope] and [B, L, H, qk_rope]."""
        q = self.q_proj(x) if self.config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split(
            [self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1
        )
        return q_nope, rotary.rotate(q_rope)

    def _latent(self, x, rotary):
        """-> the normalised latent [B, L, kv_lora_rank] and the rotated key [B, L, qk_rope]."""
        latent, rope_key = self.kv_a_proj_with_mqa(x).split(
            [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1
        )
        return self.kv_a_layernorm(latent), rotary.rotate(rope_key.unsqueeze(-2)).squeeze(-2)

    def _attend(self, q_nope, q_rope, latent, rope_key, starts):
        """Per-head keys and values; -> [B, L, H, v_head_dim]."""
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split(
            [self.config.qk_nope_head_dim, self.config.v_head_dim], dim=-1
        )
        # Joined in the layout [B, H, L, d] that attention works in.
        q = torch.cat((q_nope.transpose(1, 2), q_rope.transpose(1, 2)), dim=-1)
        rope_key = rope_key.unsqueeze(1).expand(-1, self.heads, -1, -1)
        k = torch.cat((k_nope.transpose(1, 2), rope_key), dim=-1)
        return attention_core(q, k, v.transpose(1, 2), self.scale, starts).transpose(1, 2)

    def _attend_absorbed(self, q_nope, q_rope, cache, lengths):
        """The same over everything cached, in the latent's own space; -> [B, L, H, v_head_dim]."""
        length = q_nope.shape[1]
        keys = int(lengths.max()) + length
        latent, rope_key = cache.latent[:, :keys], cache.rope_key[:, :keys]
        weight = self.kv_b_proj.weight.view(self.heads, -1, self.config.kv_lora_rank)  # [H, nope + v, C]
        up_key, up_value = weight.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        q_latent = torch.einsum("blhn,hnc->blhc", q_nope, up_key)
        scores = torch.einsum("blhc,bkc->bhlk", q_latent, latent) + torch.einsum("blhr,bkr->bhlk", q_rope, rope_key)
        places = lengths.unsqueeze(-1) + torch.arange(length, device=lengths.device)  # [B, L]
        hidden_keys = torch.arange(keys, device=lengths.device) > places.unsqueeze(-1)  # [B, L, keys]
        scores = (at_least_fp32(scores) * self.scale).masked_fill(hidden_keys.unsqueeze(1), -torch.inf)
        probs = scores.softmax(dim=-1).to(latent.dtype)
        return torch.einsum("blhc,hvc->blhv", torch.einsum("bhlk,bkc->blhc", probs, latent), up_value)
