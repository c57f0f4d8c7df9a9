"""The units of a model, which pipeline stages are made of: embed, block 0 … n-1, head, mtp 1 … mtp D.

The hidden state flows down this list. An MTP unit is its merge, its block and its head.
"""

from dataclasses import dataclass

from dstrain.config.schema import ModelConfig


@dataclass(frozen=True)
class Unit:
    kind: str  # embed | block | head | mtp
    index: int = 0  # block: the layer; mtp: the depth, from 1

    def __str__(self) -> str:
        return self.kind if self.kind in ("embed", "head") else f"{self.kind} {self.index}"

    def layer(self, config: ModelConfig) -> int | None:
        """Number of the unit's block in `model.layers`; None where it has none."""
        if self.kind == "block":
            return self.index
        return config.num_hidden_layers + self.index - 1 if self.kind == "mtp" else None


def list_units(config: ModelConfig) -> list[Unit]:
    """All units in the order of the hidden state."""
    blocks = [Unit("block", layer) for layer in range(config.num_hidden_layers)]
    modules = [Unit("mtp", depth) for depth in range(1, config.num_nextn_predict_layers + 1)]
    return [Unit("embed"), *blocks, Unit("head"), *modules]
