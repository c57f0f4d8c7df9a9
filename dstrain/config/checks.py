"""What one value may be: each check names the key, the value and what would be valid, in one line."""

import math
import re

from dstrain.config.errors import InputError

PRECISIONS = ("auto", "fp32", "bf16", "fp8", "fp64")
FP8_BACKENDS = ("auto", "emulated", "triton", "torch", "transformer_engine", "deepgemm")
FP8_SCALES = ("power_of_two", "fp32")
DEVICES = ("auto", "cpu", "cuda")
WEIGHTS = ("final", "ema")
SCHEDULES = ("1f1b", "zb1p", "dualpipe", "dualpipev")
SHAPES = ("constant", "linear", "cosine")
LARGEST_SEED = 2**64 - 1  # of torch's generators
MOST_THREADS = 4096  # more than any machine has; torch crashes at what it cannot start
LARGEST_SIZE = 2**20  # of a width; with LARGEST_COUNT of them the bytes of a matrix still fit into 64 bits
LARGEST_COUNT = 2**16  # of heads and experts
MOST_LAYERS = 4096
LARGEST_BATCH = 2**20  # sequences, whose tokens of one step lie in memory
LARGEST_PLAN = 2**16  # ranks times micro-batches of a schedule that is drawn
LARGEST_CLUSTER = 2**20  # GPUs


def given(key: str, path: str, valid: str) -> None:
    if not path or "\0" in path:
        raise InputError(f"{key} is empty or holds a null byte: must be {valid}")


def at_least(key: str, value: float, least: float, valid: str = "") -> None:
    if not value >= least or value == math.inf:
        raise InputError(f"{key}={value}: must be {valid or f'at least {least}'}")


def from_to(key: str, value: float, least: float, most: float, valid: str = "") -> None:
    if not least <= value <= most:
        raise InputError(f"{key}={value}: must be {valid}at least {least} and at most {most}")


def positive(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{key}={value}: must be above 0")


def one_of(key: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise InputError(f"{key}={value}: must be one of {', '.join(valid)}")


def parse_size(key: str, text: str) -> int:
    """Bytes of a size such as 5GB (10^9 bytes), 512MiB (2^20 bytes) or 1000000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B|B)?\s*", text)
    size = 0
    if found:
        exponent = " KMGT".index(found[2] or " ")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** exponent)
    if size < 1:
        raise InputError(f"{key}={text}: must be a size in bytes such as 5GB, 512MiB or 1000000")
    return size
