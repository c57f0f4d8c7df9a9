"""Layouts of ranks for tests of what is sharded, with the shares of a small model that their schedules give."""

from dataclasses import dataclass
from datetime import timedelta

from helpers import train_model

from dstrain.model.share import Share
from dstrain.model.unit import list_units
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.replicas import Replicas

TIMEOUT = timedelta(seconds=60)
# embed, blocks 0 1 2, head, mtp 1, mtp 2: embedding and projection are wanted at both ends.
CONFIG = train_model(num_hidden_layers=3)


@dataclass(frozen=True)
class Layout:
    """stages: by pipeline rank, the stages that it holds; cuts: units of each stage."""

    pp: int = 1
    ep: int = 1
    stages: tuple[tuple[int, ...], ...] = ((0,),)
    cuts: tuple[int, ...] = (7,)

    def replicas(self, size: int, rank: int) -> Replicas:
        mesh = Mesh(size, rank, self.pp, self.ep)
        return Replicas(mesh, CONFIG, self.shares())

    def connected(self, size: int, rank: int) -> Replicas:
        replicas = self.replicas(size, rank)
        replicas.mesh.connect(TIMEOUT)
        replicas.connect(TIMEOUT)
        return replicas

    def shares(self) -> list[Share]:
        units, begins = list_units(CONFIG), [sum(self.cuts[:i]) for i in range(len(self.cuts) + 1)]
        assert begins[-1] == len(units)
        parts = [units[a:b] for a, b in zip(begins, begins[1:])]
        return [Share.of_units(CONFIG, [unit for stage in held for unit in parts[stage]]) for held in self.stages]


DATA = Layout()
LAYOUTS = {
    2: {
        "dp 2": DATA,
        "ep 2": Layout(ep=2),
        "dualpipe pp 2": Layout(pp=2, stages=((0, 1), (0, 1)), cuts=(3, 4)),
    },
    4: {
        "dp 4": DATA,
        "edp 2, ep 2": Layout(ep=2),
        "ep 4": Layout(ep=4),
        "pp 2, ep 2": Layout(pp=2, ep=2, stages=((0,), (1,)), cuts=(3, 4)),
        "dualpipe pp 4": Layout(pp=4, stages=((0, 3), (1, 2), (1, 2), (0, 3)), cuts=(2, 1, 1, 3)),
        "dualpipe pp 2, ep 2": Layout(pp=2, ep=2, stages=((0, 1), (0, 1)), cuts=(3, 4)),
    },
}
