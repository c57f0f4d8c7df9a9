"""torchrun starts the ranks again: its key-value store still has what the dead ones wrote."""

import os
import time

import torch.distributed as dist
from ranks import spawn

from dstrain.parallel.world import World


def meet(rank: int, size: int, port: int, start: int) -> list[str]:
    """What all ranks say. In a second start rank 1 comes late, as after a slow import."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(start),
    }
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(1.5 * rank * start)
    world = World.start(timeout=20)
    world.store.set(f"from/{rank}", f"rank {rank} in start {start}")
    world.gather(None)
    return [world.store.get(f"from/{other}").decode() for other in range(size)]  # and dies without taking its leave


def test_the_ranks_of_a_restart_do_not_meet_those_before_them():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for start in range(2):
        expected = [f"rank {rank} in start {start}" for rank in range(2)]
        assert spawn(meet, 2, store.port, start, timeout=90) == [expected, expected]
