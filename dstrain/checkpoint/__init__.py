"""Checkpoints on disk: written in the background, complete or absent, verified before use.

`store` saves, keeps, verifies and finds them; `tensors` is their tensor part, `reader` reads ranges of it; `parts` is
how ranks that save together hear of each other; `folders` names and clears their folders; `files` holds what durability
needs: checksums and fsync. Nothing in these knows what a tensor means.

`hf_export` and `hf_import` write and read Hugging Face folders: `hf_names` is the map of tensor names, `hf_config` that
of config.json, `hf_tokenizer` has the tokenizer files, `hf_folder` checks and reads a folder's safetensors.
"""

from dstrain.checkpoint.files import CorruptCheckpoint
from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.tensors import load_tensors, tensor_names

__all__ = ["CheckpointStore", "CorruptCheckpoint", "load_tensors", "tensor_names"]
