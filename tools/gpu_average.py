"""A part of `gpu_check.py`: the average of the weights, fetched from the GPU while that is busy, beside float64."""

import torch

from dstrain.config.compose import compose
from dstrain.config.schema import EmaConfig
from dstrain.model.model import Model
from dstrain.precision.main_grad import attach_main_grads
from dstrain.precision.policy import resolve_precision
from dstrain.train import ema as module
from dstrain.train.ema import Ema
from dstrain.train.optimizer import AdamW

DECAY, UPDATES = 0.5, 4


def average(report, device: torch.device, dry: bool) -> None:
    """A line of `report`. The masters change behind queued work, so that a copy that is too early shows."""
    report.line("right", "average of the weights", lambda: _compare(device, 64 if dry else 8192))


def _compare(device: torch.device, size: int) -> tuple[str, float]:
    module.PIECE = 1 << 16  # several pieces of a parameter
    config, precision = compose("train", ["model=tiny"])[0], resolve_precision("bf16", device)
    with device:
        model = Model(config.model, precision.compute)
    attach_main_grads(model, precision.main)
    optimizer = AdamW(model, config.optim, precision)
    generator = torch.Generator(device).manual_seed(0)
    ema, busy = Ema(model, optimizer, EmaConfig(DECAY)), torch.zeros(size, size, device=device)
    masters = {name: state.master for name, state in optimizer.states.items()}
    for master in masters.values():
        master.normal_(generator=generator)
    ema.start()
    wanted = {name: master.double() for name, master in masters.items()}
    for update in range(1, UPDATES + 1):
        ema.wait()
        for _ in range(4):
            busy @ busy
        for name, master in masters.items():
            master.normal_(generator=generator)
            wanted[name] = DECAY * wanted[name] + (1 - DECAY) * master.double()
        ema.update(update)
    found = ema.values()
    worst = max((found[name].double() - right.cpu()).abs().max().item() for name, right in wanted.items())
    if not worst <= 1e-6:
        raise AssertionError(f"error {worst:.2e} of weights of size 1, more than 1e-6")
    return f"error {worst:.1e} of weights of size 1", worst
