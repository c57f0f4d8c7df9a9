"""What backends ask of the machine, and the one line that says what is missing."""

import importlib.metadata
import importlib.util

import torch

from dstrain.config.errors import InputError


def require_package(backend: str, module: str, distribution: str, least: str | None = None) -> None:
    """InputError unless `module` can be found, its distribution of version `least` or newer."""
    wanted = distribution + (f">={least}" if least else "")
    if importlib.util.find_spec(module) is None:
        raise InputError(f"precision.backend={backend} needs the package {wanted}, which is not installed here")
    if least is not None:
        found = importlib.metadata.version(distribution.partition("[")[0])
        if numbers(found) < numbers(least):
            raise InputError(f"precision.backend={backend} needs the package {wanted}; {found} is installed")


def require_hopper(backend: str, device: torch.device) -> None:
    """InputError unless `device` is a GPU of compute capability 9.0."""
    if device.type != "cuda":
        raise InputError(f"precision.backend={backend} needs an NVIDIA Hopper GPU, not device {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        raise InputError(
            f"precision.backend={backend} needs an NVIDIA Hopper GPU (compute capability 9.0); "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)
