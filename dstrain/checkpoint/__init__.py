"""Checkpoints on disk: written in the background, complete or absent, verified before use.

`store` saves, keeps, verifies and finds them; `tensors` is their tensor part; `folders` names and clears their folders;
`files` holds what durability needs: checksums and fsync. Nothing here knows what a tensor means.
"""

from dstrain.checkpoint.files import CorruptCheckpoint
from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.tensors import load_tensors, tensor_names

__all__ = ["CheckpointStore", "CorruptCheckpoint", "load_tensors", "tensor_names"]
