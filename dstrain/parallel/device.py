"""The device a process computes on, and how its host memory behaves."""

import ctypes
import os
import platform

import torch

from dstrain.config.errors import InputError


def pick_device(name: str, key: str = "run.device") -> torch.device:
    """auto | cpu | cuda -> the device; `key` is named in the error when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{key}=cuda: torch finds no CUDA device here; valid: auto, cpu")
    if name not in ("cpu", "cuda"):
        raise InputError(f"{key}={name}: valid are auto, cpu, cuda")
    return torch.device(name)


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks instead of returning them to the kernel and faulting every page in again.

    A training step frees and takes the same large blocks over and over; on the CPU this is a tenth to a third of its
    time. Other C libraries have no such switch, and nothing happens there. The user's MALLOC_* variables win.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 64 << 20)
