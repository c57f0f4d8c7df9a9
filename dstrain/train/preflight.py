"""Before the first step of several ranks: do they agree, is there room, and who of them or their links is slow?

What must not differ between ranks is refused with the rank's name; slowness is a warning. One rank has nothing to
compare with. `dstrain doctor` prints all of it.
"""

import hashlib
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dstrain.config.errors import InputError, StoppedElsewhere
from dstrain.config.overrides import config_folder
from dstrain.parallel.group import Group
from dstrain.parallel.layout import Layout
from dstrain.parallel.world import World

FACTORS = {"cuda": 1.5, "cpu": 4.0}  # from the median, beyond which a rank or a link is called slow; CPUs are shared
REPEATS = 3
GIB = 2**30


def agree(world: World, facts: dict[str, tuple[str, ...]]) -> None:
    """InputError that names a rank where one of these is not what rank 0 has; all ranks stop."""
    everyone = world.gather((platform.node(), facts))
    host, first = everyone[0]
    for rank, (there, theirs) in enumerate(everyone):
        for what in facts:
            if theirs[what] == first[what]:
                continue
            if not world.is_first:
                raise StoppedElsewhere
            count = sum(other[what] != first[what] for _, other in everyone)
            more, less = _only(theirs[what], first[what]), _only(first[what], theirs[what])
            if not more and not less:  # another order
                more, less = theirs[what], first[what]
            raise InputError(
                f"{what} of rank {rank} on {there} is not that of rank 0 on {host}: {' '.join(more) or 'nothing more'} "
                f"there, {' '.join(less) or 'nothing more'} here"
                + (f"; so it is on {count} of {world.size} ranks" if count > 1 else "")
                + "; valid: the same on all ranks"
            )


def _only(own: tuple[str, ...], other: tuple[str, ...]) -> list[str]:
    return [text for text in own if text not in other]


def versions() -> dict[str, tuple[str, ...]]:
    """What computes: differences change results, or hang."""
    return {
        "the code of dstrain": (code_digest(),),
        "the software": (f"Python {platform.python_version()}", f"torch {torch.__version__}"),
    }


def code_digest() -> str:
    """Of dstrain's sources and its configuration files, as they lie on this machine."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for folder, pattern in ((package, "*.py"), (config_folder(), "*.yaml")):
        for path in sorted(folder.rglob(pattern)):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclass
class Measured:
    """Of one rank. speeds: what -> a number, more is better, compared with the other ranks that have the same."""

    host: str
    device: str
    free: int | None  # bytes of the GPU
    speeds: dict[str, float]


def measure(layout: Layout, device: torch.device) -> Measured:
    """Arithmetic, the link to the next rank, and the collectives of every group; less than two seconds on CPUs.

    Links are named with how they run: a link inside a node is not compared with one between nodes.
    """
    mesh, cuda = layout.mesh, device.type == "cuda"
    speeds = {"TFLOPS of matrix products": _products(device)}
    nbytes = 2**26 if cuda else 2**20
    groups = {"all ranks": mesh.world_group, "data": mesh.dp_group, "expert": mesh.ep_group, "pipeline": mesh.pp_group}
    seen = set()
    for name, group in groups.items():
        if group.size == 1 or group.ranks in seen:
            continue
        seen.add(group.ranks)
        share = (group.size - 1) / group.size
        buffer, other = (torch.zeros(nbytes // 4 // group.size * group.size, device=device) for _ in range(2))
        seconds = _timed(lambda: group.all_reduce(buffer, "a test").wait(), device)
        speeds[f"GB/s of all-reduce, {name} group"] = 2 * share * nbytes / seconds / 1e9
        seconds = _timed(lambda: dist.all_to_all_single(other, buffer, group=group.handle), device)
        speeds[f"GB/s of all-to-all, {name} group"] = share * nbytes / seconds / 1e9
    if mesh.world_size > 1:
        seconds, crosses = _timed(lambda: _ring(mesh.world_group, buffer, other), device), layout.ranks_per_node
        before = (mesh.rank - 1) % mesh.world_size
        kind = "inside a node" if before // crosses == mesh.rank // crosses else "between nodes"
        speeds[f"GB/s from the rank before, {kind}"] = nbytes / seconds / 1e9
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    return Measured(platform.node(), name, torch.cuda.mem_get_info(device)[0] if cuda else None, speeds)


def _ring(group: Group, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    following, before = ((group.index + step) % group.size for step in (1, -1))
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, outgoing, group.ranks[following], group.handle),
        dist.P2POp(dist.irecv, incoming, group.ranks[before], group.handle),
    ])
    for work in works:
        work.wait()


def _products(device: torch.device) -> float:
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (384, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _timed(lambda: matrix @ matrix, device) / 1e12


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of some calls; the first, which connects or compiles, does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def slow(everyone: list[Measured], factor: float) -> list[str]:
    """A line for each kind of speed that is much lower on some ranks than the median of those that have it."""
    lines = []
    for what in dict.fromkeys(name for measured in everyone for name in measured.speeds):
        speeds = {rank: measured.speeds[what] for rank, measured in enumerate(everyone) if what in measured.speeds}
        median = statistics.median(speeds.values())
        found = [rank for rank in sorted(speeds, key=speeds.get) if speeds[rank] * factor < median]
        if found:
            named = ", ".join(f"rank {rank} on {everyone[rank].host} ({speeds[rank]:.3g})" for rank in found[:4])
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            lines.append(f"slow: {named}{more}: {what}, the median is {median:.3g}")
    return lines


def speed_lines(everyone: list[Measured]) -> list[str]:
    """Median and lowest of every speed."""
    lines = []
    for what in dict.fromkeys(name for measured in everyone for name in measured.speeds):
        speeds = {rank: measured.speeds[what] for rank, measured in enumerate(everyone) if what in measured.speeds}
        least = min(speeds, key=speeds.get)
        lowest = f", lowest {speeds[least]:.3g} on rank {least}" if len(speeds) > 1 else ""
        lines.append(f"{what}: {statistics.median(speeds.values()):.3g}{lowest}")
    return lines


def memory_warnings(everyone: list[Measured], need: float) -> list[str]:
    """need: bytes of rank 0; ranks of other stages need about as much."""
    return [
        f"rank {rank} on {measured.host} has {measured.free / GIB:,.1f} GiB of GPU memory free, weights, gradients "
        f"and optimizer need about {need / GIB:,.1f} GiB"
        for rank, measured in enumerate(everyone) if measured.free is not None and measured.free < need
    ]


def disk_lines(root: Path, each: int, keep: int) -> tuple[str, list[str]]:
    """What checkpoints of `each` bytes need under `root`, and a warning where that is not free.

    One is being made beside the `keep` that stay.
    """
    where = root.absolute()
    while not where.exists():
        where = where.parent
    free, there = shutil.disk_usage(where).free, len(list(root.glob("step-*/COMPLETE")))
    need = max(keep + 1 - there, 1) * each
    line = f"checkpoints of {each / GIB:,.2f} GiB, {keep} kept: {need / GIB:,.2f} GiB more needed, "
    line += f"{free / GIB:,.2f} GiB free"
    return line, [f"{line}, in {root}: a save will fail, and the run goes on without it"] if free < need else []


def preflight(world: World, layout: Layout, device: torch.device, need: float, say: Callable[[str], None]) -> list[str]:
    """Measure all ranks and warn of the slow ones. -> the host of every rank."""
    if world.size == 1:
        return [platform.node()]
    begin = time.perf_counter()
    everyone = layout.mesh.host_group.gather_objects(measure(layout, device), "measurements")
    for line in slow(everyone, FACTORS[device.type]) + memory_warnings(everyone, need):
        say(f"WARNING: {line}")
    hosts = [measured.host for measured in everyone]
    say(f"preflight: {world.size} ranks on {len(set(hosts))} hosts in {time.perf_counter() - begin:.1f} s")
    return hosts


def about(world: World, device: torch.device) -> list[str]:
    """Versions and the device of this rank."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    backend = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device.type == "cuda" else ""
    return [
        f"Python {platform.python_version()}, torch {torch.__version__}{backend}, code {code_digest()}, {sys.platform}",
        f"{world.size} {'rank' if world.size == 1 else 'ranks'}, {world.local_size} on {platform.node()}; "
        f"{device.type}: {name}",
    ]
