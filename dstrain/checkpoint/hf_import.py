"""`dstrain import`: a Hugging Face folder, BF16 or FP8, becomes a checkpoint that train, generate and export take.

Names, shapes, types and scales are checked from the headers first. Then tensors stream one by one, so that no more than
a tensor is in memory: FP8 is dequantised to BF16, half-split RoPE rows are put into pairs, everything else keeps its
type (the routing bias is FP32 always), and the MTP layers' copies of embedding and head are compared with the originals.
"""

import re
import sys
from pathlib import Path

import torch
import yaml

from dstrain.checkpoint.files import TENSORS, seal, write_file
from dstrain.checkpoint.hf_config import Folder, from_hugging_face
from dstrain.checkpoint.hf_folder import HuggingFaceFolder, some
from dstrain.checkpoint.hf_names import SCALE, Released, is_derived, mtp_depth, released_tensors
from dstrain.checkpoint.hf_tokenizer import TOKENIZER, read_tokenizer_files
from dstrain.checkpoint.new_folder import new_folder
from dstrain.checkpoint.progress import byte_progress
from dstrain.checkpoint.safetensors_file import SafetensorsWriter, TensorKinds, nbytes
from dstrain.checkpoint.store import FILES, META
from dstrain.checkpoint.tensors import FILE_BYTES
from dstrain.config import compose, validate
from dstrain.config.build import build, plain_of
from dstrain.config.errors import InputError
from dstrain.config.schema import ImportConfig, ModelConfig, TrainConfig
from dstrain.precision.fp8_blocks import FP8, dequantize_blocks, scale_shape

ROWS_AT_ONCE = 4096  # of embedding and head, when their copies are compared


def import_folder(config: ImportConfig) -> int:
    """Write the checkpoint `config.out` from the folder `config.from_`. -> the exit code."""
    source = HuggingFaceFolder(Path(config.from_))
    what = from_hugging_face(source.config, _name(source.path), str(source.path / "config.json"))
    plain = run_config(what.model, source.path)  # refuses impossible sizes before anything is built from them
    reader = WeightReader(source, what)
    plain["model"] = plain_of(reader.model)
    files = read_tokenizer_files(source.path, reader.model.vocab_size)
    if TOKENIZER not in files:
        reader.notices.append("no tokenizer: generate cannot use this checkpoint, train needs data.tokenizer=…")
    files["config.yaml"] = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode()

    kinds = reader.kinds()
    size = sum(nbytes(*kind) for kind in kinds.values())
    with new_folder(config.out, "out", size + sum(map(len, files.values()))) as folder:
        (folder / TENSORS).mkdir()
        with byte_progress(f"importing {source.path.name}", size) as advance:
            reader.check_copies()
            for file, names in _files(kinds).items():
                with SafetensorsWriter(folder / TENSORS / file, {name: kinds[name] for name in names}) as writer:
                    for name in names:
                        for index, tensor in reader.parts(name, kinds[name][1]):
                            writer.write(name, tensor, index)
                            advance(tensor.nbytes)
        (folder / FILES).mkdir()
        for name, data in files.items():
            write_file(folder / FILES / name, data)
        meta = f'{{"format": 1, "imported": true, "torch": "{torch.__version__}"}}'
        write_file(folder / META, meta.encode())
        with byte_progress("checksums", size) as advance:
            seal(folder, advance)
    for notice in reader.notices:  # only now: what fails says so in one line
        _report(f"{source.path}: {notice}")
    depth, origin = reader.model.num_nextn_predict_layers, ", from FP8" if reader.scales else ""
    _report(f"{config.out}: {len(kinds)} tensors, {size:,} bytes, MTP depth {depth}{origin}")
    return 0


class WeightReader:
    """The weights of a folder under a checkpoint's names. Building it checks every name, shape, type and scale.

    `notices`: lines for the user about what was not taken as it stands.
    """

    def __init__(self, source: HuggingFaceFolder, what: Folder):
        self.source, self.interleaved, self.model = source, what.rope_interleave, what.model
        self.notices: list[str] = []
        names = {name for name in source.kinds if not is_derived(name)}
        if len(names) < len(source.kinds):
            count = len(source.kinds) - len(names)
            self.notices.append(f"{count} tensors of RoPE's inverse frequencies were not read, config.json gives them")
        announced, held = self.model.num_nextn_predict_layers, mtp_depth(names, self.model.num_hidden_layers)
        if announced and not held:
            # transformers keeps the number and drops the modules when it saves a model
            self.notices.append(f"config.json announces {announced} MTP modules, the weights have none: MTP depth is 0")
            self.model.num_nextn_predict_layers = 0
        self.tensors = released_tensors(self.model)
        self.parts_of: dict[str, list[Released]] = {}
        for tensor in self.tensors:
            if not tensor.copy:
                self.parts_of.setdefault(tensor.ours, []).append(tensor)
        self.scales = self._check_scales(names, what.fp8)
        self._check_names(names - set(self.scales.values()))
        self._check_shapes()

    def kinds(self) -> TensorKinds:
        """Name -> (shape, dtype) of the checkpoint's tensors."""
        kinds = {}
        for ours, parts in self.parts_of.items():
            dtype = self._dtype(parts[0])
            for part in parts[1:]:
                dtype = torch.promote_types(dtype, self._dtype(part))
            kinds[ours] = (parts[0].shape if parts[0].expert is None else (len(parts), *parts[0].shape)), dtype
        return kinds

    def parts(self, ours: str, dtype: torch.dtype):
        """The tensor `ours` as (None, tensor), or as (expert, slice) one by one."""
        for part in self.parts_of[ours]:
            yield part.expert, self._in_pairs(ours, self._read(part.name)).to(dtype)

    def check_copies(self) -> None:
        """InputError where an MTP layer's copy of embedding or head differs from the original."""
        for copy in self.tensors:
            if not copy.copy or copy.name not in self.source.kinds:
                continue  # a copy that is left out leaves nothing unknown
            for first in range(0, copy.shape[0], ROWS_AT_ONCE):
                if not torch.equal(self._rows(copy.name, first), self._rows(copy.ours, first)):
                    raise InputError(
                        f"{self.source.file_of(copy.name)}: {copy.name} differs from {copy.ours}; the MTP modules of "
                        "dstrain share embedding and head with the main model"
                    )

    def _rows(self, name: str, first: int) -> torch.Tensor:
        return self.source.read(name, first, ROWS_AT_ONCE)

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        if name in self.scales:
            return dequantize_blocks(tensor, self.source.read(self.scales[name]), torch.bfloat16)
        return tensor

    def _dtype(self, tensor: Released) -> torch.dtype:
        stored = self.source.kinds[tensor.name][1]
        if tensor.is_routing_bias or stored == torch.float16:  # FP32 holds every FP16 value, BF16 does not
            return torch.float32
        return torch.bfloat16 if stored == FP8 else stored

    def _in_pairs(self, ours: str, weight: torch.Tensor) -> torch.Tensor:
        """Rows of rotated dimensions from half-split order (j and j + d/2 are a pair) to neighbours (2j and 2j + 1)."""
        rope = self.model.qk_rope_head_dim
        if self.interleaved or not ours.endswith(("q_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
            return weight
        heads = 1 if "kv_a_proj" in ours else self.model.num_attention_heads
        per_head = weight.unflatten(0, (heads, -1)).clone()
        halves = per_head[:, -rope:].unflatten(1, (2, -1))  # [heads, 2, d/2, in]
        per_head[:, -rope:] = halves.transpose(1, 2).flatten(1, 2)
        return per_head.flatten(0, 1)

    def _check_scales(self, names: set[str], fp8: bool) -> dict[str, str]:
        """FP8 weight -> its scales."""
        quantized = sorted(name for name in names if self.source.kinds[name][1] == FP8)
        if quantized and not fp8:
            where = self.source.path / "config.json"
            raise InputError(f"{where}: no quantization_config, but {some(quantized)} are FP8")
        lost = [name for name in quantized if name + SCALE not in names]
        if lost:
            raise InputError(
                f"{self.source.file_of(lost[0])}: FP8 weights without scales: "
                f"{some([f'{name} (no {name + SCALE} in any shard)' for name in lost])}"
            )
        return {name: name + SCALE for name in quantized}

    def _check_names(self, names: set[str]) -> None:
        required = [tensor.name for tensor in self.tensors if not tensor.copy]
        missing = [name for name in required if name not in names]
        left = sorted(names - {tensor.name for tensor in self.tensors})
        if missing:
            also = f"; left over: {some(left)}" if left else ""
            raise InputError(f"{self.source.path}: {len(missing)} tensors are missing: {some(missing)}{also}")
        if left:
            raise InputError(
                f"{self.source.file_of(left[0])}: {len(left)} tensors are left over that a model of this config.json "
                f"does not have: {some(left)}"
            )

    def _check_shapes(self) -> None:
        for tensor in self.tensors:
            if tensor.name not in self.source.kinds:
                continue
            shape, dtype = self.source.kinds[tensor.name]
            where = f"{self.source.file_of(tensor.name)}: {tensor.name}"
            if shape != tensor.shape:
                raise InputError(f"{where} is {list(shape)}, config.json makes it {list(tensor.shape)}")
            if dtype == torch.float8_e8m0fnu or dtype == FP8 and (len(shape) != 2 or tensor.copy):
                raise InputError(f"{where} is FP8, which only matrices are")
            if tensor.name in self.scales:
                scales = self.scales[tensor.name]
                found, kind = self.source.kinds[scales]
                if found != scale_shape(shape) or kind == FP8:
                    raise InputError(
                        f"{self.source.file_of(scales)}: {scales} is {list(found)}, a weight {list(shape)} has "
                        f"{list(scale_shape(shape))} scales of 128x128 blocks"
                    )


def run_config(model: ModelConfig, source: Path) -> dict:
    """A complete train configuration around `model`, as plain containers; InputError where the model is impossible."""
    plain = compose.values("train", [])
    plain["run"]["name"] = model.name
    plain["model"] = plain_of(model)
    plain["data"]["sequence_length"] = min(plain["data"]["sequence_length"], model.max_position_embeddings)
    plain["data"]["vocab_size"] = model.vocab_size
    try:
        return plain_of(validate.validate(build(TrainConfig, plain)))
    except InputError as error:
        raise InputError(f"{source / 'config.json'}: {error}") from None


def _files(kinds: TensorKinds) -> dict[str, list[str]]:
    """File -> the tensors it holds, in order, about FILE_BYTES each."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, kind in kinds.items():
        if groups[-1] and filled + nbytes(*kind) > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes(*kind)
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _name(path: Path) -> str:
    """A name for model and run after the folder's."""
    return re.sub(r"[^\w.-]+", "-", path.resolve().name)[:60].strip(".-") or "imported"


def _report(line: str) -> None:
    print(f"dstrain: {line}", file=sys.stderr)
