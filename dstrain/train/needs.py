"""What a run needs of memory and disk, before anything is allocated."""

import os

import torch

from dstrain.config.errors import InputError
from dstrain.config.schema import TrainConfig
from dstrain.model.count import Counts
from dstrain.parallel.layout import Layout
from dstrain.parallel.world import World
from dstrain.precision.policy import Precision


def checkpoint_bytes(config: TrainConfig, counts: Counts, precision: Precision) -> int:
    """Bytes of all ranks' weights, masters and moments, and of the weights' average."""
    each = precision.compute.itemsize + sum(state_sizes(config, precision)) + average_size(config, precision)
    return counts.total * each


def state_sizes(config: TrainConfig, precision: Precision) -> tuple[int, int]:
    """Bytes of an element's master, 0 where the weight is its own, and of its two moments."""
    main = precision.main.itemsize
    return main if precision.compute != precision.main else 0, 4 if config.optim.moments == "bf16" else 2 * main


def average_size(config: TrainConfig, precision: Precision) -> int:
    """Bytes of an element of the weights' average."""
    return 0 if config.ema.decay is None else precision.main.itemsize


def check_memory(
    config: TrainConfig, layout: Layout, precision: Precision, device: torch.device, world: World
) -> tuple[float, float]:
    """Bytes that weights, gradients and optimizer need, and that the device has, or the machine on a CPU.

    On a CPU with the weights' average, which is in host memory. InputError when they alone do not fit.
    """
    held = layout.parameters()  # numel, and over how many ranks its optimizer state is spread
    quantized = 0 if precision.fp8 is None else 2  # a weight in E4M3 and its transpose
    each = precision.compute.itemsize + precision.main.itemsize + quantized
    resident = sum(numel for numel, _ in held) * each
    own = sum(numel / ranks for numel, ranks in held)
    need, average = resident + own * sum(state_sizes(config, precision)), own * average_size(config, precision)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        have = torch.cuda.get_device_properties(device).total_memory
        if average * world.local_size > host:
            raise InputError(
                f"ema.decay={config.ema.decay}: the average of the weights needs "
                f"{average * world.local_size / 2**30:,.1f} GiB of host memory, the machine has {host / 2**30:,.1f} GiB; "
                "valid: null, or more ranks"
            )
    else:
        have = host
        need = (need + average) * world.local_size
    if need > have:
        ranks = f" of {world.local_size} ranks on one machine" if world.local_size > 1 and device.type == "cpu" else ""
        raise InputError(
            f"model={config.model.name} does not fit: {sum(numel for numel, _ in held):,} parameters (MTP included) need "
            f"{need / 2**30:,.1f} GiB for weights, gradients and optimizer{ranks} in {precision.name}, {device.type} has "
            f"{have / 2**30:,.1f} GiB; take a smaller model or more ranks"
        )
    return need, have
