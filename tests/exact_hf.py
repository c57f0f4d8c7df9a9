"""Hugging Face's DeepseekV3 and V2 in float64: they round to float32 in norms, router, softmax and RoPE, and here their
modules see a `torch` whose float32 is float64, so a comparison is exact to float64's own rounding."""

import torch
import transformers.modeling_rope_utils as hf_rope
import transformers.models.deepseek_v2.modeling_deepseek_v2 as hf_v2
import transformers.models.deepseek_v3.modeling_deepseek_v3 as hf_v3


class _DoubleTorch:
    """`torch`, but asking for float32 gives float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def make_exact(monkeypatch) -> None:
    for module in (hf_v2, hf_v3, hf_rope):
        monkeypatch.setattr(module, "torch", _DoubleTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
