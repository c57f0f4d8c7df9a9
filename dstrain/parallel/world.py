"""All ranks of a run: who this process is, and how the ranks agree while they start.

torchrun, deepspeed and Slurm's wrapper tell a process its place by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Without WORLD_SIZE, or with 1, there is one rank and torch.distributed is not used.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dstrain.config.errors import InputError, StoppedElsewhere
from dstrain.parallel.group import CommunicationError, Group, one_line

T = TypeVar("T")
# Seconds that ranks wait for the first one while the run starts: it may have to tokenise a corpus.
START_TIMEOUT = 4 * 3600.0
STARTING = "what the ranks say at the start of the run"


class World:
    """rank of size; local_rank of local_size on this machine."""

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int):
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.start_group = Group((rank,), rank)
        self.store: dist.Store | None = None  # keys and values that all ranks see

    @classmethod
    def start(cls, timeout: float = 600.0) -> "World":
        """Join the others. timeout: seconds for every wait of a collective later on.

        Every group works on CPU tensors (gloo), and on CUDA tensors (NCCL) where this process has a GPU. Raises
        InputError for an environment that no launcher makes, CommunicationError where the ranks do not meet.
        """
        on_node = "LOCAL_SIZE" if os.environ.get("LOCAL_SIZE") else "LOCAL_WORLD_SIZE"  # the former: deepspeed
        rank, size, local_rank, local_size = (_number(key, default) for key, default in (
            ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), (on_node, 1)
        ))
        if size < 1:
            raise InputError(f"WORLD_SIZE={size}: must be at least 1; start the ranks with torchrun")
        world = cls(rank, size, local_rank, local_size)
        if size > 1:
            for key in ("RANK", "LOCAL_RANK", on_node, "MASTER_ADDR", "MASTER_PORT"):
                if not os.environ.get(key):
                    raise InputError(f"WORLD_SIZE={size}, but {key} is not set; start the ranks with torchrun")
            if not 0 <= rank < size:
                raise InputError(f"RANK={rank}: must be from 0 to WORLD_SIZE - 1 = {size - 1}")
            # CUDA reads it when it starts: one queue from host to GPU for each stream that is busy at once. A DualPipe
            # rank computes while its pipeline channels, expert dispatch and gradient reduction run on streams of their
            # own; in a shared queue (there are 8 by default) the work of one stream waits behind another's.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
            backend = "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(local_rank % torch.cuda.device_count())
                backend = "cpu:gloo,cuda:nccl"
            port = _number("MASTER_PORT", 0)
            if not 0 < port < 2**16:
                raise InputError(f"MASTER_PORT={port}: must be from 1 to {2**16 - 1}; torchrun sets it")
            limit = timedelta(seconds=timeout)
            try:
                world.store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=limit))
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's, and not new after a restart
                    start = f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
                    world.store = dist.PrefixStore(start, world.store)
                groups = dist.PrefixStore("groups", world.store)
                dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=limit)
                handle = dist.new_group(backend="gloo", timeout=timedelta(seconds=START_TIMEOUT))
            except (RuntimeError, ValueError) as error:
                where = f"{os.environ['MASTER_ADDR']}:{port}"
                raise CommunicationError(f"the {size} ranks did not meet at {where}: {one_line(error)}") from error
            world.start_group = Group(tuple(range(size)), rank, handle)
        return world

    def device(self, device: torch.device) -> torch.device:
        """`device` with this rank's own number, where there are several."""
        return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, function: Callable[[], T]) -> T:
        """function() of rank 0, on all ranks; the result is pickled. Its InputError ends all of them."""
        if self.size == 1:
            return function()
        if not self.is_first:
            return self._result(self.start_group.first_object(None, STARTING))
        try:
            outcome = True, function()
        except InputError as error:
            outcome = False, error
        except BaseException:
            self.start_group.first_object((False, None), STARTING)
            raise
        return self._result(self.start_group.first_object(outcome, STARTING))

    def _result(self, outcome):
        good, value = outcome
        if good:
            return value
        if self.is_first:
            raise value
        raise StoppedElsewhere

    def all(self, function: Callable[[], T]) -> T:
        """function() of this rank, once it has succeeded on all of them. An InputError of any rank ends all.

        The lowest rank that failed says why, and that it was this rank alone unless all failed alike.
        """
        return self.start_group.together(function, STARTING, name_rank=True)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, pickled."""
        return self.start_group.gather_objects(value, STARTING)

    def end(self) -> None:
        """Leave the group. After a failure the process just exits: others may be gone already."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _number(key: str, default: int) -> int:
    text = os.environ.get(key) or str(default)
    if not text.isdecimal():
        raise InputError(f"{key}={text!r} in the environment: must be a whole number; torchrun sets it")
    return int(text)
