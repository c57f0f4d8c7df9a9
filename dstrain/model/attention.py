"""Multi-head latent attention (arXiv 2412.19437 §2.1.1): low-rank queries, one latent and one rotated key a token.

    c_Q = norm(W_DQ h)      [q_C; q_R] = W_UQ c_Q           q_R rotated per head
    c_KV = norm(W_DKV h)    [k_C; v]   = W_UKV c_KV         k_R = RoPE(W_KR h), one for all heads
    o = softmax(scale · [q_C; q_R] [k_C; k_R]ᵀ) v           u = W_O o

With a cache only c_KV and k_R are kept, and W_UKV is absorbed: q_C k_C = (W_UKᵀ q_C) c_KV, so that all heads share the
keys [c_KV; k_R] and the values c_KV. Where the cache was empty the heads are computed as in training.

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
from dstrain.precision.linear import Linear, join, normed_linears
from dstrain.precision.pointwise import RMSNorm
from dstrain.precision.policy import at_least_fp32


LATENT_EPS = 1e-6  # of the two norms inside attention: released code gives them none of the config's rms_norm_eps


CACHE_STEP = 64  # entries that a cache grows by: products with it have few shapes, each of which the CPU compiles for BF16


class Places:
    """Where L new tokens of each sequence go in the caches, and what they see there; the same for every layer."""

    def __init__(self, lengths: torch.Tensor, new: int, device: torch.device):
        """lengths int64 [B], on the host: tokens that the caches already hold. new: L."""
        self.keys = int(lengths.max()) + new
        self.room = -(-self.keys // CACHE_STEP) * CACHE_STEP
        self.first = int(lengths[0]) if bool((lengths == lengths[0]).all()) else None  # the common place, if there is one
        index = (lengths.unsqueeze(-1) + torch.arange(new)).to(device)
        self.rows, self.index = torch.arange(len(lengths), device=device).unsqueeze(-1), index  # [B, 1], [B, L]
        # Entries that come after a token or are none: bool [B, room, L, 1].
        self.unseen = (torch.arange(self.room, device=device).view(-1, 1) > index.unsqueeze(1)).unsqueeze(-1)


@dataclass
class AttentionContext:
    """What attention needs besides the hidden state, the same for every layer of a micro-batch."""

    rotary: Rotary
    starts: torch.Tensor | None = None  # int64 [B, L], see attention_core
    places: Places | None = None  # with a cache


class LatentCache:
    """Per token of one layer an entry [kv_lora_rank + qk_rope_head_dim]: the normalised latent, and the rotated key."""

    def __init__(self, config: ModelConfig, sequences: int, dtype: torch.dtype, device: torch.device):
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.entries = torch.zeros(sequences, 0, width, dtype=dtype, device=device)

    def make_room(self, places: Places) -> None:
        """To be called before `write`."""
        if (more := places.room - self.entries.shape[1]) > 0:
            self.entries = torch.nn.functional.pad(self.entries, (0, 0, 0, more))

    def write(self, entries: torch.Tensor, places: Places) -> None:
        """entries [B, L, width] of new tokens; whatever was at their places is lost."""
        if places.first is not None:
            self.entries[:, places.first : places.keys] = entries
        else:
            self.entries[places.rows, places.index] = entries


class Attention(nn.Module):
    """MLA; without q_lora_rank the query comes from one plain projection."""

    absorbed: tuple[torch.Tensor, torch.Tensor] | None = None  # W_UK and W_UV laid out for decoding, see `freeze`

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

    def freeze(self) -> None:
        """Make ready for decoding, see `Model.freeze`."""
        join(self._first_projection, self.kv_a_proj_with_mqa)
        self.absorbed = tuple(weight.contiguous() for weight in self._absorbed_weights())

    @property
    def _first_projection(self) -> Linear:
        return self.q_proj if self.config.q_lora_rank is None else self.q_a_proj

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm, context: AttentionContext, cache: LatentCache | None = None
    ) -> torch.Tensor:
        """hidden [B, L, hidden], norm the block's, which comes before -> [B, L, hidden]."""
        q_down, kv_down = normed_linears(hidden, norm, self._first_projection, self.kv_a_proj_with_mqa, again=True)
        if cache is not None:
            out = self._attend_cached(q_down, kv_down, cache, context)
        elif self.fp8 is not None:
            out = _AttendAgain.apply(self, context, q_down, kv_down)
        else:
            out = attention_core(*self.heads_of(q_down, kv_down, context.rotary), self.scale, context.starts)
            out = out.transpose(1, 2)
        return self.o_proj(out.flatten(-2), e5m6=True)

    def _query(self, q_down, rotary):
        """-> the parts without and with position, [B, L, H, qk_nope] and [B, L, H, qk_rope]."""
        q_nope, q_rope = self._unrotated_query(q_down)
        return q_nope, rotary.rotate(q_rope)

    def _unrotated_query(self, q_down):
        q = q_down
        if self.config.q_lora_rank is not None:
            (q,) = normed_linears(q_down, self.q_a_layernorm, self.q_b_proj)
        return q.unflatten(-1, (self.heads, -1)).split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)

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
        return self._join_heads(q_nope, q_rope, kv, rope_key.unsqueeze(-2))

    def _join_heads(self, q_nope, q_rope, kv, rope_key):
        """q_nope, q_rope [B, L, H, ·], kv [B, L, H · ·], rope_key [B, L, 1, qk_rope] -> as `heads_of`."""
        k_nope, v = kv.unflatten(-1, (self.heads, -1)).split(
            [self.config.qk_nope_head_dim, self.config.v_head_dim], dim=-1
        )
        # Joined in the layout [B, H, L, d] that attention works in.
        q = torch.cat((q_nope.transpose(1, 2), q_rope.transpose(1, 2)), dim=-1)
        rope_key = rope_key.transpose(1, 2).expand(-1, self.heads, -1, -1)
        k = torch.cat((k_nope.transpose(1, 2), rope_key), dim=-1)
        return q, k, v.transpose(1, 2)

    def _attend_cached(self, q_down, kv_down, cache, context):
        """Write the new tokens' entries and attend over all; -> [B, L, H, v_head_dim]."""
        places, rotary = context.places, context.rotary
        latent, rope_key = kv_down.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        q_nope, q_rope = self._unrotated_query(q_down)
        latent = self.kv_a_layernorm(latent)
        # One rotation for the queries and, as one more head, the key.
        turned = rotary.rotate(torch.cat((q_rope, rope_key.unsqueeze(-2)), dim=-2))
        q_rope, rope_key = turned.split([self.heads, 1], dim=-2)
        cache.write(torch.cat((latent, rope_key.squeeze(-2)), dim=-1), places)
        if places.first == 0 and q_nope.shape[1] > 1:
            heads = self._join_heads(q_nope, q_rope, self.kv_b_proj(latent), rope_key)
            return attention_core(*heads, self.scale).transpose(1, 2)
        return self._attend_absorbed(q_nope, q_rope, cache.entries[:, : places.room], places.unseen)

    def _attend_absorbed(self, q_nope, q_rope, entries, unseen):
        """Over entries [B, keys, C + qk_rope] but those that are `unseen` [B, keys, L, 1]; -> [B, L, H, v_head_dim].

        Entries come first in the scores' product and whole in the values': so no product copies the cache.
        """
        sequences, length = q_nope.shape[:2]
        up_key, up_value = self.absorbed or self._absorbed_weights()
        q_latent = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), up_key).transpose(0, 1)  # [B·L, H, C]
        q = torch.cat((q_latent, q_rope.flatten(0, 1)), dim=-1).view(sequences, length * self.heads, -1)
        scores = at_least_fp32(torch.bmm(entries, q.transpose(1, 2))) * self.scale  # [B, keys, L·H]
        scores.view(sequences, -1, length, self.heads).masked_fill_(unseen, -torch.inf)
        probs = scores.softmax(dim=1).to(entries.dtype)
        latents = torch.bmm(probs.transpose(1, 2), entries)[..., : self.config.kv_lora_rank]
        heads = latents.reshape(sequences * length, self.heads, -1).transpose(0, 1)  # [H, B·L, C]
        return torch.bmm(heads, up_value).transpose(0, 1).unflatten(0, (sequences, length))

    def _absorbed_weights(self):
        """W_UK [H, qk_nope, C] and W_UVᵀ [H, C, v_head_dim], views of W_UKV."""
        weight = self.kv_b_proj.dense_weight().view(self.heads, -1, self.config.kv_lora_rank)
        up_key, up_value = weight.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        return up_key, up_value.transpose(1, 2)


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
