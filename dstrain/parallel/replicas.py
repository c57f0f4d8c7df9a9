"""Who else holds a parameter (DESIGN §1.4): its replica group, derived from its name.

A stage's weights are on every pipeline rank that holds the stage: one, or two in DualPipe. Embedding and projection are
wherever a unit uses them. On those pipeline ranks an expert is on the edp ranks that have its number, everything else
on all dp ranks. Gradients are summed over this group, optimizer state is divided among it.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from dstrain.config.errors import InputError
from dstrain.config.schema import ModelConfig
from dstrain.model.share import Share
from dstrain.parallel.group import Group, new_groups
from dstrain.parallel.mesh import Mesh

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Replicas:
    """The replica groups of one rank's parameters, and where its experts lie in the whole layer."""

    def __init__(self, mesh: Mesh, config: ModelConfig, shares: Sequence[Share] | None = None):
        """shares: of each pipeline rank (their `experts` are not looked at); None: one pipeline rank holds everything.

        Communicates once `connect` was called; a single process needs no connect.
        """
        if config.n_routed_experts % mesh.ep:
            valid = [ep for ep in range(1, config.n_routed_experts + 1) if config.n_routed_experts % ep == 0]
            raise InputError(
                f"parallel.ep={mesh.ep} does not divide model.n_routed_experts={config.n_routed_experts}; "
                f"valid: {', '.join(map(str, valid))}"
            )
        self.mesh, self.config = mesh, config
        self.shares = [Share.whole(config)] * mesh.pp if shares is None else list(shares)
        if len(self.shares) != mesh.pp:
            raise ValueError(f"{len(self.shares)} shares for {mesh.pp} pipeline ranks")
        count = config.n_routed_experts // mesh.ep
        self.experts = range(mesh.ep_rank * count, (mesh.ep_rank + 1) * count)
        self._groups = {(mesh.rank,): Group((mesh.rank,), mesh.rank)}

    @property
    def share(self) -> Share:
        """What this rank holds."""
        return replace(self.shares[self.mesh.pp_rank], experts=self.experts)

    def connect(self, timeout: timedelta) -> None:
        """Make the process groups, one for each distinct set of ranks, on every rank of the world at once."""
        mesh, config, shares = self.mesh, self.config, self.shares
        layers = range(config.num_hidden_layers + config.num_nextn_predict_layers)
        in_layer = {tuple(p for p, share in enumerate(shares) if layer in share.layers) for layer in layers}
        elsewhere = {
            tuple(p for p, share in enumerate(shares) if share.embedding),
            tuple(p for p, share in enumerate(shares) if share.head),
            tuple(p for p, share in enumerate(shares) if 0 in share.norms),
        }
        sets = {self._dense(holders) for holders in in_layer | elsewhere}
        sets |= {self._expert(holders, j) for holders in in_layer for j in range(mesh.ep)}
        self._groups |= new_groups(sets, mesh.rank, timeout)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Every rank that holds what this rank has, or would have, under a parameter's name, ascending."""
        holders = tuple(p for p, share in enumerate(self.shares) if holds(share, name))
        return self._expert(holders, self.mesh.ep_rank) if is_expert(name) else self._dense(holders)

    def group(self, name: str) -> Group:
        """The replica group of a parameter of this rank."""
        return self._groups[self.ranks(name)]

    def global_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """A local shape -> the parameter's shape in the whole model: all its experts."""
        return (self.config.n_routed_experts, *shape[1:]) if is_expert(name) else tuple(shape)

    def first(self, name: str) -> int:
        """Where this rank's part of a parameter begins, along its leading dimension."""
        return self.experts.start if is_expert(name) else 0

    def _dense(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(p * self.mesh.dp + data_rank for p in holders for data_rank in range(self.mesh.dp))

    def _expert(self, holders: tuple[int, ...], ep_rank: int) -> tuple[int, ...]:
        return tuple(self.mesh.rank_of(p, i, ep_rank) for p in holders for i in range(self.mesh.edp))


def is_expert(name: str) -> bool:
    """Whether a parameter's leading dimension counts routed experts."""
    return ".mlp.experts." in name


def holds(share: Share, name: str) -> bool:
    """Whether a rank with this share has the parameter or buffer called `name`."""
    layer = _LAYER.match(name)
    if layer:
        return int(layer[1]) in share.layers
    try:
        return {
            "model.embed_tokens.weight": share.embedding,
            "model.norm.weight": 0 in share.norms,
            "lm_head.weight": share.head,
        }[name]
    except KeyError:
        raise ValueError(f"{name} is not the name of a parameter") from None
