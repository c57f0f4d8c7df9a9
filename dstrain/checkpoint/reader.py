"""Reading a checkpoint's tensors one by one, or parts of them, with no more than that in memory."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dstrain.checkpoint.files import TENSORS, CorruptCheckpoint
from dstrain.checkpoint.tensors import tensor_names

OPEN_FILES = 64  # kept open, the newest


class CheckpointReader:
    """The tensors of the complete checkpoint `path`; `kinds` is name -> (shape, dtype).

    Before it is read from it is the index alone, which one rank can make and send to the others.
    """

    def __init__(self, path: Path):
        self.path = path
        self.kinds = tensor_names(path)
        metadata = HuggingFaceStorageReader(str(path / TENSORS)).read_metadata()
        # name -> [(offset, shape, file)]: a tensor that several ranks saved has several pieces
        self._pieces: dict[str, list] = {}
        for index, place in metadata.storage_data.items():
            piece = tuple(index.offset), tuple(place.shape), place.relative_path
            self._pieces.setdefault(index.fqn, []).append(piece)
        self._opened = {}  # file -> its handle

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Tensor `name`, or `count` of its leading dimension from `first` on, on the CPU."""
        shape, dtype = self.kinds[name]
        out = torch.empty((shape[0] - first if count is None else count, *shape[1:]), dtype=dtype)
        self.fill(name, out, first)
        return out

    def fill(self, name: str, into: torch.Tensor, first: int = 0) -> None:
        """Copy len(into) of the leading dimension of `name`, from `first` on, into a tensor of any device and type."""
        end = first + len(into)
        for offset, piece, file in self._pieces[name]:
            low, high = max(first, offset[0]), min(end, offset[0] + piece[0])
            if low >= high:
                continue
            place = (slice(low - first, high - first), *(slice(o, o + n) for o, n in zip(offset[1:], piece[1:])))
            try:
                into[place].copy_(self._stored(file).get_slice(name)[low - offset[0] : high - offset[0]])
            except (OSError, SafetensorError) as error:
                raise CorruptCheckpoint(f"checkpoint {self.path}: {Path(file).name}: {error}") from error

    def fill_range(self, name: str, into: torch.Tensor, first: int) -> None:
        """Copy elements [first, first + n) of `name`, flattened, into [n]; of a matrix whole rows are read."""
        shape, _ = self.kinds[name]
        width, count = torch.Size(shape[1:]).numel(), len(into)
        if not count:
            return
        row, end = first // width, -(-(first + count) // width)
        if first % width == 0 and count % width == 0:
            return self.fill(name, into.view(-1, *shape[1:]), row)
        into.copy_(self.read(name, row, end - row).view(-1)[first - row * width :][:count])

    def _stored(self, file: str):
        if file not in self._opened:
            if len(self._opened) == OPEN_FILES:
                del self._opened[next(iter(self._opened))]
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]
