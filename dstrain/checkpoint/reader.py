"""Reading a checkpoint's tensors one by one, or a slice of them, with no more than that in memory."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dstrain.checkpoint.files import TENSORS, CorruptCheckpoint
from dstrain.checkpoint.tensors import tensor_names


class CheckpointReader:
    """The tensors of the complete checkpoint `path`; `kinds` is name -> (shape, dtype)."""

    def __init__(self, path: Path):
        self.path = path
        self.kinds = tensor_names(path)
        metadata = HuggingFaceStorageReader(str(path / TENSORS)).read_metadata()
        # name -> [(offset, shape, file)]: a tensor that several ranks saved has several pieces
        self._pieces: dict[str, list] = {}
        for index, place in metadata.storage_data.items():
            piece = tuple(index.offset), tuple(place.shape), place.relative_path
            self._pieces.setdefault(index.fqn, []).append(piece)

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Tensor `name`, or `count` of its leading dimension from `first` on, on the CPU."""
        shape, dtype = self.kinds[name]
        count = shape[0] - first if count is None else count
        out = torch.empty((count, *shape[1:]), dtype=dtype)
        for offset, piece, file in self._pieces[name]:
            begin, end = max(first, offset[0]), min(first + count, offset[0] + piece[0])
            if begin >= end:
                continue
            place = (slice(begin - first, end - first), *(slice(o, o + n) for o, n in zip(offset[1:], piece[1:])))
            try:
                with safe_open(file, framework="pt") as stored:
                    out[place] = stored.get_slice(name)[begin - offset[0] : end - offset[0]]
            except (OSError, SafetensorError) as error:
                raise CorruptCheckpoint(f"checkpoint {self.path}: {Path(file).name}: {error}") from error
        return out
