"""Multi-head latent attention (arXiv 2412.19437 §2.1.1): low-rank queries, one latent and one rotated key a token.

    c_Q = norm(W_DQ h)      [q_C; q_R] = W_UQ c_Q           q_R rotated per head
    c_KV = norm(W_DKV h)    [k_C; v]   = W_UKV c_KV         k_R = RoPE(W_KR h), one for all heads
    o = softmax(scale · [q_C; q_R] [k_C; k_R]ᵀ) v           u = W_O o

With a cache only c_KV and k_R are kept, and W_UKV is absorbed: q_C k_C = (W_UKᵀ q_C) c_KV.

In FP8 training only the results of W_DQ and of [W_DKV; W_KR] are kept, and o as E5M6: norms, up-projections and rotation
run again in backward.
"""

from dataclasses import dataclass

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.attention_core import attention_core, attention_core_backward
from dstrain.model.rope import Rotary, softmax_scale
from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.linear import Linear, normed_linears
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

    def __init__(self, config: ModelConfig, dtype: torch.dtype, fp8: GemmBackend | None = None):
        super().__init__()
        self.config, self.heads, self.fp8 = config, config.num_attention_heads, fp8
        self.scale = softmax_scale(config)
        hidden, q_out = config.hidden_size, self.heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, q_out, dtype, fp8)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, dtype, fp8)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS, dtype)
            self.q_b_proj = Linear(config.q_lora_rank, q_out, dtype, fp8)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, dtype, fp8)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_EPS, dtype)
        kv_out = self.heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = Linear(config.kv_lora_rank, kv_out, dtype, fp8)
        self.o_proj = Linear(self.heads * config.v_head_dim, hidden, dtype, fp8)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm, context: AttentionContext, cache: LatentCache | None = None
    ) -> torch.Tensor:
        """hidden [B, L, hidden], norm the block's, which comes before -> [B, L, hidden]."""
        first = self.q_proj if self.config.q_lora_rank is None else self.q_a_proj
        q_down, kv_down = normed_linears(hidden, norm, first, self.kv_a_proj_with_mqa, again=True)
        if cache is not None:
            latent, rope_key = self._latent(kv_down, context.rotary)
            cache.append(self.kv_a_layernorm(latent), rope_key, context.lengths)
            out = self._attend_absorbed(*self._query(q_down, context.rotary), cache, context.lengths)
        elif self.fp8 is not None:
            out = _AttendAgain.apply(self, context, q_down, kv_down)
        else:
            out = attention_core(*self.heads_of(q_down, kv_down, context.rotary), self.scale, context.starts)
            out = out.transpose(1, 2)
        return self.o_proj(out.flatten(-2), e5m6=True)

    def _query(self, q_down, rotary):
        """-> the parts without and with position, [B, L, H, qk_nope] and [B, L, H, qk_rope]."""
        q = q_down
        if self.config.q_lora_rank is not None:
            (q,) = normed_linears(q_down, self.q_a_layernorm, self.q_b_proj)
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split(
            [self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1
        )
        return q_nope, rotary.rotate(q_rope)

    def _latent(self, kv_down, rotary):
        """-> the latent [B, L, kv_lora_rank], before its norm, and the rotated key [B, L, qk_rope]."""
        latent, rope_key = kv_down.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return latent, rotary.rotate(rope_key.unsqueeze(-2)).squeeze(-2)

    def heads_of(
        self, q_down: torch.Tensor, kv_down: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From the down-projections [B, L, ·] to every head's q, k [B, H, L, qk_head_dim] and v [B, H, L, v_head_dim]."""
        q_nope, q_rope = self._query(q_down, rotary)
        latent, rope_key = self._latent(kv_down, rotary)
        (kv,) = normed_linears(latent, self.kv_a_layernorm, self.kv_b_proj)
        k_nope, v = kv.unflatten(-1, (self.heads, -1)).split(
            [self.config.qk_nope_head_dim, self.config.v_head_dim], dim=-1
        )
        # Joined in the layout [B, H, L, d] that attention works in.
        q = torch.cat((q_nope.transpose(1, 2), q_rope.transpose(1, 2)), dim=-1)
        rope_key = rope_key.unsqueeze(1).expand(-1, self.heads, -1, -1)
        k = torch.cat((k_nope.transpose(1, 2), rope_key), dim=-1)
        return q, k, v.transpose(1, 2)

    def _attend_absorbed(self, q_nope, q_rope, cache, lengths):
        """The same over everything cached, in the latent's own space; -> [B, L, H, v_head_dim]."""
        length = q_nope.shape[1]
        keys = int(lengths.max()) + length
        latent, rope_key = cache.latent[:, :keys], cache.rope_key[:, :keys]
        weight = self.kv_b_proj.dense_weight().view(self.heads, -1, self.config.kv_lora_rank)  # [H, nope + v, C]
        up_key, up_value = weight.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        q_latent = torch.einsum("blhn,hnc->blhc", q_nope, up_key)
        scores = torch.einsum("blhc,bkc->bhlk", q_latent, latent) + torch.einsum("blhr,bkr->bhlk", q_rope, rope_key)
        places = lengths.unsqueeze(-1) + torch.arange(length, device=lengths.device)  # [B, L]
        hidden_keys = torch.arange(keys, device=lengths.device) > places.unsqueeze(-1)  # [B, L, keys]
        scores = (at_least_fp32(scores) * self.scale).masked_fill(hidden_keys.unsqueeze(1), -torch.inf)
        probs = scores.softmax(dim=-1).to(latent.dtype)
        return torch.einsum("blhc,hvc->blhv", torch.einsum("bhlk,bkc->blhc", probs, latent), up_value)


class _AttendAgain(torch.autograd.Function):
    """From the down-projections to o [B, L, H, v_head_dim]; keeps them alone and computes the heads again in backward."""

    @staticmethod
    def forward(ctx, attention, context, q_down, kv_down):
        ctx.save_for_backward(q_down, kv_down)
        ctx.attention, ctx.context = attention, context
        heads = attention.heads_of(q_down, kv_down, context.rotary)
        return attention_core(*heads, attention.scale, context.starts).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        attention, context = ctx.attention, ctx.context
        downs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            heads = attention.heads_of(*downs, context.rotary)
        plain = [x.detach() for x in heads]
        grads = attention_core_backward(*plain, attention.scale, context.starts, grad.transpose(1, 2))
        torch.autograd.backward(heads, grads)
        return None, None, *(x.grad for x in downs)
