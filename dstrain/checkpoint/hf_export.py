"""`dstrain export`: a checkpoint as a Hugging Face folder that transformers, vLLM and SGLang load.

    config.json, generation_config.json, model-XXXXX-of-XXXXX.safetensors, model.safetensors.index.json, tokenizer files

Tensors stream one by one from the checkpoint: from the optimizer's FP32 masters where it has them, or from the average
of the weights (weights=ema), so every type is rounded once. The routing bias is FP32 in every folder. With dtype=fp8 the
matrices of attention and of the FFNs are E4M3 with `weight_scale_inv`; embedding, head, gate, norms and eh_proj are BF16,
as in DeepSeek's own folders.
"""

import json
import math
import sys
from dataclasses import dataclass, field

import torch

from dstrain.checkpoint.files import write_file
from dstrain.checkpoint.find import find_checkpoint
from dstrain.checkpoint.hf_config import to_hugging_face
from dstrain.checkpoint.hf_folder import INDEX
from dstrain.checkpoint.hf_names import SCALE, Released, checkpoint_shapes, released_tensors
from dstrain.checkpoint.hf_tokenizer import TOKENIZER, written_tokenizer_files
from dstrain.checkpoint.new_folder import new_folder
from dstrain.checkpoint.progress import byte_progress
from dstrain.checkpoint.reader import CheckpointReader
from dstrain.checkpoint.safetensors_file import SafetensorsWriter, TensorKinds, nbytes
from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.weights import EMA, MASTER, require_average
from dstrain.config.checks import parse_size
from dstrain.config.errors import InputError
from dstrain.config.run_files import load_train_config
from dstrain.config.schema import ExportConfig, ModelConfig
from dstrain.data.tokenizer import Tokenizer
from dstrain.precision.fp8_blocks import FP8, quantize_blocks, scale_shape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}  # of what is not FP8


def export_folder(config: ExportConfig) -> int:
    """Write the Hugging Face folder `config.out`. -> the exit code."""
    path = find_checkpoint(config.checkpoint, _report)
    model = load_train_config(CheckpointStore.file(path, "config.yaml").decode()).model
    stored = CheckpointStore.files(path)
    tokenizer = Tokenizer(stored[TOKENIZER].decode(), f"{path}: {TOKENIZER}") if TOKENIZER in stored else None
    bos, eos = (tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
    dtype = str(DTYPES[config.dtype]).removeprefix("torch.")
    files = {"config.json": _json(to_hugging_face(model, bos, eos, dtype, config.dtype == "fp8"))}
    files |= written_tokenizer_files(stored, tokenizer)

    weights = WeightSource(CheckpointReader(path), model, config)
    shards = plan_shards(weights, parse_size("shard_size", config.shard_size), config.shard_size)
    size = sum(shard.size for shard in shards)
    weight_map = {}
    with new_folder(config.out, "out", size + sum(map(len, files.values()))) as folder:
        with byte_progress(f"exporting {path.name}", size) as advance:
            for number, shard in enumerate(shards, 1):
                file = f"model-{number:05}-of-{len(shards):05}.safetensors"
                with SafetensorsWriter(folder / file, shard.kinds) as writer:
                    for tensor in shard.tensors:
                        for name, value in weights.read(tensor).items():
                            writer.write(name, value)
                            weight_map[name] = file
                            advance(value.nbytes)
        total = sum(nbytes(*kind) for shard in shards for kind in shard.kinds.values())
        files[INDEX] = _json({"metadata": {"total_size": total}, "weight_map": weight_map})
        for name, data in files.items():
            write_file(folder / name, data)
    if tokenizer is None:
        _report(f"checkpoint {path} has no tokenizer: the folder is written without one")
    _report(f"{config.out}: {len(weight_map)} tensors in {len(shards)} files, {total:,} bytes, {config.dtype}")
    return 0


class WeightSource:
    """A checkpoint's weights as the tensors of the released folder, in the type that is asked for."""

    def __init__(self, reader: CheckpointReader, model: ModelConfig, config: ExportConfig):
        self.reader, self.config, self.plain = reader, config, DTYPES[config.dtype]
        wanted = checkpoint_shapes(model)
        stored = {name: kind[0] for name, kind in reader.kinds.items() if name.startswith(("model.", "lm_head."))}
        if stored != wanted:
            differ = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
            raise InputError(f"checkpoint {reader.path}: not the tensors of its config.yaml, first {differ[0]}")
        if config.weights == "ema":
            require_average(reader)
        self.tensors = released_tensors(model)

    def kinds(self, tensor: Released) -> TensorKinds:
        """What the folder holds of a tensor: one entry, or weight and scales."""
        if tensor.is_routing_bias:
            return {tensor.name: (tensor.shape, torch.float32)}
        if self.config.dtype == "fp8" and tensor.may_be_fp8:
            scales = scale_shape(tensor.shape), torch.float32
            return {tensor.name: (tensor.shape, FP8), tensor.name + SCALE: scales}
        return {tensor.name: (tensor.shape, self.plain)}

    def read(self, tensor: Released) -> dict[str, torch.Tensor]:
        """The values of `kinds`."""
        weight = self._weight(tensor)
        kinds = self.kinds(tensor)
        if len(kinds) == 1:
            return {tensor.name: weight.to(kinds[tensor.name][1])}
        if not weight.isfinite().all():
            raise InputError(f"checkpoint {self.reader.path}: {tensor.name} is not finite, so it has no FP8 scales")
        values = quantize_blocks(weight, self.config.fp8_scales == "power_of_two")
        return dict(zip(kinds, values, strict=True))

    def _weight(self, tensor: Released) -> torch.Tensor:
        size = math.prod(tensor.shape)
        flat = (EMA if self.config.weights == "ema" else MASTER) + tensor.ours
        if self.config.weights == "ema" or flat in self.reader.kinds:
            return self.reader.read(flat, (tensor.expert or 0) * size, size).view(tensor.shape)
        if tensor.expert is None:
            return self.reader.read(tensor.ours)
        return self.reader.read(tensor.ours, tensor.expert, 1)[0]


@dataclass
class Shard:
    """One file: tensors, what it holds of them, and an upper bound of its size in bytes."""

    tensors: list[Released] = field(default_factory=list)
    kinds: TensorKinds = field(default_factory=dict)
    size: int = 128  # the header's own part


def plan_shards(weights: WeightSource, limit: int, asked: str) -> list[Shard]:
    """All tensors in their order, in files of at most `limit` bytes. InputError if one alone is larger."""
    shards = [Shard()]
    for tensor in weights.tensors:
        kinds = weights.kinds(tensor)
        size = sum(nbytes(*kind) + SafetensorsWriter.header_bytes(name) for name, kind in kinds.items())
        if size + Shard.size > limit:
            raise InputError(f"shard_size={asked}: {tensor.name} alone needs a file of {size + Shard.size:,} bytes")
        if shards[-1].size + size > limit:
            shards.append(Shard())
        shards[-1].tensors.append(tensor)
        shards[-1].kinds |= kinds
        shards[-1].size += size
    return shards


def _json(value: dict) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _report(line: str) -> None:
    print(f"dstrain: {line}", file=sys.stderr)
