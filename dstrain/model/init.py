"""Initial values: norms 1, routing bias 0, everything else N(0, initializer_range).

A value is a function of (seed, parameter name) alone, an expert's of its own number, so every layout of ranks and
every device starts from the same model.
"""

import hashlib

import torch

from dstrain.config.schema import ModelConfig


def initial_value(
    name: str, shape: torch.Size, config: ModelConfig, seed: int, dtype: torch.dtype, first_expert: int = 0
) -> torch.Tensor:
    """The initial value of parameter `name` in `dtype`, on the CPU; drawn in FP32.

    shape: of the part that is wanted. first_expert: the number in the whole layer of an expert tensor's first.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    if ".experts." in name:
        numbers = range(first_expert, first_expert + shape[0])
        experts = [_normal(f"{name}[{expert}]", shape[1:], config, seed) for expert in numbers]
        return torch.stack(experts).to(dtype)
    return _normal(name, shape, config, seed).to(dtype)


def _normal(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, config.initializer_range, generator=generator)
