"""The part of a model that one rank holds. Its parameters keep the names they have in the whole model."""

from dataclasses import dataclass

from dstrain.config.schema import ModelConfig
from dstrain.model.unit import Unit, list_units


@dataclass(frozen=True)
class Share:
    """Embedding and projection are held wherever a unit uses them: copies, which must be kept equal."""

    layers: frozenset[int]  # numbers in model.layers, MTP modules last
    embedding: bool
    head: bool  # the projection, lm_head
    norms: frozenset[int]  # depths whose head's norm is held; an MTP module's is part of its layer
    experts: range  # of every MoE layer, by their numbers in the whole layer

    @classmethod
    def of_units(cls, config: ModelConfig, units: list[Unit], experts: range | None = None) -> "Share":
        """What these units need; experts None: all."""
        heads = frozenset(unit.index for unit in units if unit.kind in ("head", "mtp"))
        return cls(
            layers=frozenset(layer for unit in units if (layer := unit.layer(config)) is not None),
            embedding=any(unit.kind in ("embed", "mtp") for unit in units),
            head=bool(heads),
            norms=heads,
            experts=range(config.n_routed_experts) if experts is None else experts,
        )

    @classmethod
    def whole(cls, config: ModelConfig) -> "Share":
        return cls.of_units(config, list_units(config))
