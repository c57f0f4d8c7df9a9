"""Several ranks on this machine for tests: one process of one thread each, joined by a gloo group, never for ever.

    def check(rank, size, name):  # at the top level of a module, so that a new process can import it
        ...

    spawn(check, 4, "dualpipe")
"""

import multiprocessing
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

GRACE = 0.5  # seconds for the others to report too once a rank has failed: often it failed because of them


class RankFailure(AssertionError):
    """A rank raised, died or was not done in time; the message holds the traceback of every rank that reported one."""


def spawn(function: Callable, size: int, *arguments, timeout: float = 120.0) -> list:
    """Run function(rank, size, *arguments) on `size` ranks. -> what each returned, by rank.

    function, arguments and results are pickled. timeout: seconds for all of it, and for each of gloo's own waits; then
    the ranks that are left are killed. Raises RankFailure as soon as one rank fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(context, rank, function, size, arguments, folder, timeout) for rank in range(size)]
        try:
            return _collect(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, for servers that start in a while.

    From below 32768, where systems begin to take a connection's own port: one of those could be gone until then, and
    whoever expects the server would speak to a stranger.
    """
    ports = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(10000, 32768)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


class _Rank:
    def __init__(self, context, number: int, function, size: int, arguments: tuple, folder: str, timeout: float):
        self.number = number
        self.pipe, end = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(end, function, number, size, arguments, folder, timeout))
        self.process.start()
        end.close()  # so that a rank that dies ends the pipe


def _main(pipe, function, rank: int, size: int, arguments: tuple, folder: str, timeout: float) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        answer = pickle.dumps((True, function(rank, size, *arguments)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)  # as bytes: PyTorch would send tensors as shared memory, which ends with its process
    pipe.close()
    # Without the clean-up of an interpreter's end: gloo's would wait for ranks that are gone.
    os._exit(0)


def _collect(ranks: list[_Rank], deadline: float) -> list:
    results, failures, waiting = {}, {}, {rank.pipe: rank for rank in ranks}
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(deadline - time.monotonic(), 0)):
            rank = waiting.pop(pipe)
            try:
                good, what = pickle.loads(pipe.recv_bytes())
            except EOFError:
                rank.process.join()
                good, what = False, f"died with exit code {rank.process.exitcode}"
            (results if good else failures)[rank.number] = what
            if not good:
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        raise RankFailure("\n".join(f"rank {number}: {what}" for number, what in failures.items()))
    if waiting:
        raise RankFailure(f"ranks {sorted(rank.number for rank in waiting.values())} were not done in time")
    return [results[number] for number in range(len(ranks))]
