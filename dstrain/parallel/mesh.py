"""The mesh of ranks: pipeline × expert data × expert parallel (DESIGN §4).

    rank = (pp_rank · edp + i) · ep + j        dp = edp · ep

pp_rank: which stages; j: which experts; i: which copy of those experts. A data rank is a rank's place among those of
its pipeline rank, i · ep + j: which part of the global batch it trains on.
"""

from datetime import timedelta

from dstrain.config.errors import InputError
from dstrain.parallel.group import Group, host_backend, new_groups


class Mesh:
    """Where one rank stands, and after `connect` the groups that it communicates in. A single process needs no connect.

    world_group: all ranks. dp_group: those of this pipeline rank. ep_group: those that share a copy of every expert.
    pp_group: those of this data rank, one a pipeline rank. host_group: all ranks, for what lives in host memory.
    """

    def __init__(self, world_size: int, rank: int, pp: int = 1, ep: int = 1):
        """Raises InputError where pp · ep does not divide the world size."""
        for key, value in (("pp", pp), ("ep", ep)):
            if value < 1:
                raise InputError(f"parallel.{key}={value}: must be at least 1")
        if world_size % (pp * ep):
            raise InputError(_not_dividing(world_size, pp, ep))
        self.world_size, self.rank = world_size, rank
        self.pp, self.ep, self.edp = pp, ep, world_size // (pp * ep)
        self.dp = self.edp * ep
        self.pp_rank, self.data_rank = divmod(rank, self.dp)
        self.edp_rank, self.ep_rank = divmod(self.data_rank, ep)
        alone = Group((rank,), rank)
        self.world_group = self.dp_group = self.ep_group = self.pp_group = self.host_group = alone

    def rank_of(self, pp_rank: int, edp_rank: int, ep_rank: int) -> int:
        return (pp_rank * self.edp + edp_rank) * self.ep + ep_rank

    def connect(self, timeout: timedelta) -> None:
        """Make the groups, on every rank at once; torch.distributed is initialised. Each has its own process group.

        timeout: of a collective in any of them.
        """
        if self.world_size == 1:
            return
        dp, ep = self.dp, self.ep
        everyone = tuple(range(self.world_size))

        def group(sets: list[tuple[int, ...]]) -> Group:
            (own,) = new_groups(sets, self.rank, timeout).values()
            return own

        self.world_group = group([everyone])
        self.dp_group = group([everyone[first : first + dp] for first in everyone[::dp]])
        self.ep_group = group([everyone[first : first + ep] for first in everyone[::ep]])
        self.pp_group = group([everyone[data_rank::dp] for data_rank in range(dp)])
        (self.host_group,) = new_groups([everyone], self.rank, timeout, backend=host_backend()).values()


def _not_dividing(world_size: int, pp: int, ep: int) -> str:
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    valid = [f"parallel.pp={pp} with parallel.ep one of {_list(n // pp for n in divisors if n % pp == 0)}"]
    valid += [f"parallel.ep={ep} with parallel.pp one of {_list(n // ep for n in divisors if n % ep == 0)}"]
    possible = [line for line, given in zip(valid, (pp, ep)) if world_size % given == 0]
    multiples = f"a world size that is a multiple of {pp * ep}"
    return (
        f"parallel.pp={pp} times parallel.ep={ep} is {pp * ep}, which does not divide the world size of {world_size}; "
        f"valid: {', or '.join([*possible, multiples])}"
    )


def _list(numbers) -> str:
    return ", ".join(map(str, numbers))
