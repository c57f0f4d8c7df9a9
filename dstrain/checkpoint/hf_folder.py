"""A Hugging Face folder of safetensors as a set of tensors: its index checked, its tensors read one by one.

Everything that the headers can show is checked before any tensor is read: shards missing, truncated or unknown to the
index, tensors missing from their shard or doubled.
"""

import json
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dstrain.config.errors import InputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
VALID = "a Hugging Face folder with config.json and safetensors"
OPEN_FILES = 2  # kept open: a weight and its scales may lie in different shards
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class HuggingFaceFolder:
    """`config` is its config.json; `kinds` is name -> (shape, dtype) of every tensor."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise InputError(f"from={path}: no such folder; valid: {VALID}")
        self.config = self._json("config.json")
        files = self._files()
        self.kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._file_of: dict[str, str] = {}
        self._open: OrderedDict[str, safe_open] = OrderedDict()
        for file, names in files.items():
            self._scan(file, names)

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Tensor `name`, or `count` of its rows from `first` on."""
        stored = self._opened(self._file_of[name])
        try:
            if count is None:
                return stored.get_tensor(name)
            return stored.get_slice(name)[first : first + count]
        except SafetensorError as error:
            raise InputError(f"{self.path / self._file_of[name]}: {name}: {error}") from None

    def file_of(self, name: str) -> Path:
        return self.path / self._file_of[name]

    def _files(self) -> dict[str, set[str] | None]:
        """Shard -> the names that the index puts there; None: there is no index, whatever it holds."""
        present = {path.name for path in self.path.glob("*.safetensors")}
        if not (self.path / INDEX).is_file():
            if present == {SINGLE}:
                return {SINGLE: None}
            what = f"{len(present)} safetensors files without one" if present else "no safetensors"
            raise InputError(f"{self.path}: {what}; valid: {INDEX} and its shards, or {SINGLE} alone")
        weight_map = self._json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise InputError(f"{self.path / INDEX}: no weight_map of tensor names to files")
        files: dict[str, set[str] | None] = {}
        for name, file in weight_map.items():
            if file != Path(file).name:
                raise InputError(f"{self.path / INDEX}: {name} is in {file!r}, which is no file of the folder")
            files.setdefault(file, set()).add(name)
        missing = sorted(files.keys() - present)
        if missing:
            held = sorted(files[missing[0]])
            raise InputError(
                f"{self.path / missing[0]}: the shard is missing, with {some(held)}"
                + (f"; {len(missing)} shards are missing in all" if len(missing) > 1 else "")
            )
        foreign = sorted(present - files.keys())
        if foreign:
            raise InputError(f"{self.path / foreign[0]}: the shard is not in {INDEX}; remove it or complete the index")
        return files

    def _scan(self, file: str, names: set[str] | None) -> None:
        """Takes in the header of a shard."""
        path = self.path / file
        stored = self._opened(file, sorted(names or ()))
        held = list(stored.keys())
        if names is not None:
            if absent := sorted(names - set(held)):
                raise InputError(f"{path}: {INDEX} says that it holds {some(absent)}, it does not")
            for name in sorted(set(held) - names):
                if name in self._file_of or self._listed_elsewhere(name):
                    raise InputError(f"{path}: {name} is doubled, {INDEX} has it in another shard")
                raise InputError(f"{path}: {name} is not in {INDEX}")
        for name in held:
            piece = stored.get_slice(name)
            dtype = DTYPES.get(str(piece.get_dtype()))
            if dtype is None:
                raise InputError(f"{path}: {name} is of type {piece.get_dtype()}; valid: {', '.join(DTYPES)}")
            self.kinds[name] = tuple(piece.get_shape()), dtype
            self._file_of[name] = file

    def _listed_elsewhere(self, name: str) -> bool:
        return name in self._json(INDEX)["weight_map"]

    def _opened(self, file: str, names: list[str] = ()) -> safe_open:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        path = self.path / file
        try:
            self._open[file] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            held = f", with {some(names)}" if names else ""
            raise InputError(
                f"{path}: truncated or no safetensors file{held} ({path.stat().st_size:,} bytes; "
                f"{' '.join(str(error).split())})"
            ) from None
        while len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        return self._open[file]

    def _json(self, name: str) -> dict:
        path = self.path / name
        if not path.is_file():
            raise InputError(f"{path}: missing; valid: {VALID}")
        try:
            parsed = json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: _unique(pairs, path))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise InputError(f"{path}: not a JSON object")
        return parsed


def some(names: list[str], shown: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _unique(pairs: list, path: Path) -> dict:
    out = {}
    for key, value in pairs:
        if key in out:
            raise InputError(f"{path}: {key!r} is doubled")
        out[key] = value
    return out
