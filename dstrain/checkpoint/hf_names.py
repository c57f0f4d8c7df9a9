"""The one map between a checkpoint's tensors and the names in released Hugging Face folders, read in both directions.

Names are equal except for two things. A checkpoint stacks the experts of a layer, [experts, out, in], where a released
folder has one tensor for each: `mlp.experts.{e}.gate_proj.weight`. And the layers of MTP modules (`num_hidden_layers`
and on) carry copies of the embedding, `embed_tokens.weight`, and of the output head, `shared_head.head.weight`, which
a checkpoint does not repeat.
"""

import re
from dataclasses import dataclass

import torch

from dstrain.config.schema import ModelConfig
from dstrain.model.model import Model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROUTING_BIAS = "e_score_correction_bias"
SCALE = "_scale_inv"  # behind the name of an FP8 weight: the name of its scales

_STACK = re.compile(r"(.+\.mlp\.experts)\.(\w+_proj\.weight)")
# What is FP8 in released FP8 weights: the Linears of attention and of the FFNs.
_FP8 = re.compile(r".+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")
_INVERSE_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Released:
    """One tensor of a released folder, and where it is in a checkpoint."""

    name: str
    ours: str  # the checkpoint's tensor
    shape: tuple[int, ...]
    expert: int | None = None  # the index into a stack of experts; None: the whole tensor
    copy: bool = False  # an MTP layer's copy of embedding or head

    @property
    def may_be_fp8(self) -> bool:
        return len(self.shape) == 2 and _FP8.fullmatch(self.name) is not None

    @property
    def is_routing_bias(self) -> bool:
        return self.name.endswith(ROUTING_BIAS)


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight and routing bias of a checkpoint, in the model's order."""
    with torch.device("meta"):
        model = Model(config, torch.bfloat16)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def released_tensors(config: ModelConfig) -> list[Released]:
    """Every tensor of the released folder of `config`, in the checkpoint's order, copies behind their originals."""
    tensors = []
    for ours, shape in checkpoint_shapes(config).items():
        stack = _STACK.fullmatch(ours)
        if stack:
            for expert in range(shape[0]):
                tensors.append(Released(f"{stack[1]}.{expert}.{stack[2]}", ours, shape[1:], expert))
        else:
            tensors.append(Released(ours, ours, shape))
        for module in range(config.num_nextn_predict_layers):
            layer = f"model.layers.{config.num_hidden_layers + module}"
            if ours == EMBEDDING:
                tensors.append(Released(f"{layer}.embed_tokens.weight", ours, shape, copy=True))
            if ours == HEAD:
                tensors.append(Released(f"{layer}.shared_head.head.weight", ours, shape, copy=True))
    return tensors


def is_derived(name: str) -> bool:
    """Whether a released tensor is computed from the configuration: some folders store RoPE's inverse frequencies."""
    return _INVERSE_FREQUENCIES.fullmatch(name) is not None


def mtp_depth(names: set[str], num_hidden_layers: int) -> int:
    """How many MTP layers a folder with these tensors holds."""
    layers = {int(found[1]) for found in (re.match(r"model\.layers\.(\d+)\.", name) for name in names) if found}
    return max(0, max(layers, default=-1) + 1 - num_hidden_layers)
