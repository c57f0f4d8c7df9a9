"""The state of a run as one tree: tensors by name, and a few integers. What a checkpoint holds is exactly this.

With several ranks each contributes pieces of the same tree, and takes from it what its own layout needs:

    weights, biases          under Hugging Face's names; experts as ranges of the leading dimension
    optimizer.*, ema.*       ranges of the flattened tensors
    rng.cpu, rng.cpu.1, …    the generator of each data rank

So any layout reads what any other wrote. RNG: a data rank continues the stream of its number. Where the checkpoint has
fewer data ranks, the new ones keep what they were seeded with; where it has more, those streams end.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from dstrain.checkpoint.progress import byte_progress
from dstrain.checkpoint.reader import CheckpointReader
from dstrain.checkpoint.tensors import Piece, Tensors, require_same
from dstrain.checkpoint.weights import EMA, MASTER
from dstrain.config.schema import ModelConfig, TrainConfig
from dstrain.model.init import initial_value
from dstrain.model.model import Model
from dstrain.parallel.replicas import Replicas
from dstrain.precision.fp8_linear import weights_were_written
from dstrain.precision.main_grad import attach_main_grads
from dstrain.precision.policy import Precision
from dstrain.train.ema import Ema
from dstrain.train.optimizer import AdamW, ParameterState

EXP_AVG, EXP_AVG_SQ = "optimizer.exp_avg.", "optimizer.exp_avg_sq."
RNG = "rng.cpu"
BIAS = "e_score_correction_bias"  # no parameter, so it has no optimizer state


@dataclass
class RunState:
    """step: attempted optimizer steps. samples: consumed. updates and tokens: of the steps that were applied."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    recent_losses: list[float] = field(default_factory=list)  # of applied steps, for `guard`

    def to_meta(self) -> dict:
        return asdict(self)

    def roll_back(self, saved: "RunState") -> None:
        """Weights are those of `saved` again, and what is read from tokens. Steps and samples go on."""
        self.tokens, self.updates, self.recent_losses = saved.tokens, saved.updates, saved.recent_losses
        self.skipped = self.step - self.updates


def build_state(
    config: TrainConfig, precision: Precision, device: torch.device, replicas: Replicas | None = None
) -> tuple[Model, AdamW]:
    """The model on `device` with its gradients, and its optimizer. Weights are not set yet: `initialise` or `restore`.

    replicas: which rank holds what, connected; None: this process holds everything.
    """
    with device:
        share = None if replicas is None else replicas.share
        model = Model(config.model, precision.compute, share, fp8=precision.fp8)
    attach_main_grads(model, precision.main)
    return model, AdamW(model, config.optim, precision, replicas)


def run_tensors(model: Model, optimizer: AdamW, ema: Ema | None = None) -> Tensors:
    """This rank's part of every tensor of the run: weights and biases, flat optimizer state, their average, RNG.

    Of copies one rank contributes, in turns, so that all have about as much to write.
    """
    replicas, tensors = optimizer.replicas, {}
    averages = {} if ema is None else ema.values()
    for name, value in model.state_dict().items():
        ranks = replicas.ranks(name)
        if ranks[zlib.crc32(name.encode()) % len(ranks)] == replicas.mesh.rank:
            first = (replicas.first(name), *[0] * (value.ndim - 1))
            tensors[name] = _part(value, replicas.global_shape(name, value.shape), first)
            if name in averages and name not in optimizer.states:  # a bias: whole wherever its layer is
                tensors[EMA + name] = averages[name]
    for name, state in optimizer.states.items():
        numel = math.prod(replicas.global_shape(name, state.parameter.shape))
        kinds = [(EXP_AVG, state.exp_avg), (EXP_AVG_SQ, state.exp_avg_sq)]
        kinds += [(MASTER, state.master)] if state.has_master else []
        kinds += [(EMA, averages[name])] if averages else []
        for prefix, flat in kinds:
            if len(flat):
                tensors[prefix + name] = _part(flat, (numel,), (_begin(replicas, name, state) + state.first,))
    if replicas.mesh.pp_rank == 0:
        tensors[rng_name(replicas.mesh.data_rank)] = torch.get_rng_state()
    return tensors


def rng_name(data_rank: int) -> str:
    return f"{RNG}.{data_rank}" if data_rank else RNG


def initialise(model: Model, optimizer: AdamW, seed: int) -> None:
    """Initial weights by (seed, name); biases are 0 already."""
    for name in optimizer.states:
        set_initial(model, optimizer, name, seed)


def set_initial(model: Model, optimizer: AdamW, name: str, seed: int) -> None:
    """Set one parameter to its initial value."""
    state, first = optimizer.states[name], optimizer.replicas.first(name)
    value = initial_value(name, state.parameter.shape, model.config, seed, state.master.dtype, first)
    optimizer.set_weight(name, value)


def restore(model: Model, optimizer: AdamW, path: Path, ema: Ema | None = None) -> list[str]:
    """Fill model, optimizer, average and RNG from the checkpoint at `path`, written in any layout and any precision.

    -> lines that say where the checkpoint has an average and the run does not, or the other way round: then it starts
    from the weights. All ranks call this; where the checkpoint is bad for one of them, none goes on.
    """
    mesh, reader = optimizer.replicas.mesh, _open(optimizer, path)
    generator = torch.get_rng_state()
    has_average = any(name.startswith(EMA) for name in reader.kinds)

    def load():
        if ema is not None:
            ema.wait()
        weights = whole_kinds(model)
        trained = {name: math.prod(shape) for name, (shape, _) in weights.items() if not name.endswith(BIAS)}
        moments = {
            prefix + name: ((numel,), torch.float32)
            for name, numel in trained.items() for prefix in (EXP_AVG, EXP_AVG_SQ)
        }
        averages = {EMA + name: ((math.prod(shape),), torch.float32) for name, (shape, _) in weights.items()}
        wanted = {**weights, **moments, **(averages if has_average else {})}
        _require(reader, {**wanted, RNG: (tuple(generator.shape), generator.dtype)}, ("",))
        _fill(model, optimizer, reader, list(model.state_dict()), moments=True)
        if ema is not None and has_average:
            _fill_average(optimizer, ema, reader)
        if rng_name(mesh.data_rank) in reader.kinds:
            reader.fill(rng_name(mesh.data_rank), generator)

    mesh.host_group.together(load, f"loading {path}")
    torch.set_rng_state(generator)
    if ema is not None and not has_average:
        ema.start()
        return [f"ema.decay={ema.decay:g}: {path.name} holds no average of the weights, so it starts from its weights"]
    if ema is None and has_average:
        return [f"ema.decay=null: the average of the weights in {path.name} is dropped"]
    return []


def load_weights(model: Model, optimizer: AdamW, path: Path, prefixes: Sequence[str]) -> None:
    """Fill the weights and biases whose names begin with one of `prefixes`, with their masters, from a checkpoint.

    These must be, in the whole model, all that the checkpoint has of such names. Weights may be of any float type.
    """
    reader, prefixes = _open(optimizer, path), tuple(prefixes)

    def load():
        wanted = {name: kind for name, kind in whole_kinds(model).items() if name.startswith(prefixes)}
        _require(reader, wanted, prefixes)
        _fill(model, optimizer, reader, [name for name in model.state_dict() if name in wanted], moments=False)

    optimizer.replicas.mesh.host_group.together(load, f"loading {path}")


def whole_kinds(model: Model) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of every weight and bias of the whole model that `model` may be a share of."""
    with torch.device("meta"):
        whole = Model(model.config, model.dtype)
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in whole.state_dict().items()}


def _part(tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]) -> torch.Tensor | Piece:
    return tensor if tuple(tensor.shape) == shape else Piece(tensor, shape, offset)


def _begin(replicas: Replicas, name: str, state: ParameterState) -> int:
    """Where this rank's parameter begins in the flattened global one."""
    return replicas.first(name) * math.prod(state.parameter.shape[1:])


def _open(optimizer: AdamW, path: Path) -> CheckpointReader:
    """The checkpoint's index, read by the first rank for all."""
    host = optimizer.replicas.mesh.host_group
    reader = host.together(lambda: CheckpointReader(path) if host.index == 0 else None, f"the index of {path}")
    return host.first_object(reader, f"the index of {path}")


def _require(reader: CheckpointReader, wanted: dict, prefixes: tuple[str, ...]) -> None:
    """InputError unless the checkpoint has exactly `wanted` under `prefixes`; float types may differ.

    Beside these a checkpoint has masters of weights that were narrower than the main type, and one RNG a data rank.
    """
    stored = reader.kinds
    masters = {
        MASTER + name: ((math.prod(shape),), stored[MASTER + name][1])
        for name, (shape, _) in wanted.items() if MASTER + name in stored
    }
    prefixes = (*prefixes, *(MASTER + prefix for prefix in prefixes))
    saved = {
        name: kind for name, kind in stored.items() if name.startswith(prefixes) and not name.startswith(RNG + ".")
    }
    both_float = {
        name: (shape, stored[name][1])
        for name, (shape, dtype) in wanted.items()
        if name in stored and dtype.is_floating_point and stored[name][1].is_floating_point
    }
    require_same(reader.path, saved, {**wanted, **both_float, **masters})


def _fill(model: Model, optimizer: AdamW, reader: CheckpointReader, names: list[str], moments: bool) -> None:
    """Read what this rank has of these weights and biases, and with `moments` of their optimizer state."""
    replicas, tensors = optimizer.replicas, model.state_dict()
    total = sum(tensors[name].nbytes for name in names) if replicas.mesh.rank == 0 else 0
    with byte_progress(f"loading {reader.path.name}", total) as advance:
        for name in names:
            if name not in optimizer.states:
                reader.fill(name, tensors[name], replicas.first(name))
                continue
            state = optimizer.states[name]
            begin = _begin(replicas, name, state)
            _fill_weight(reader, name, state, begin)
            if moments:
                reader.fill_range(EXP_AVG + name, state.exp_avg, begin + state.first)
                reader.fill_range(EXP_AVG_SQ + name, state.exp_avg_sq, begin + state.first)
            advance(tensors[name].nbytes)
    weights_were_written()


def _fill_average(optimizer: AdamW, ema: Ema, reader: CheckpointReader) -> None:
    for name, value in ema.values().items():
        state = optimizer.states.get(name)
        reader.fill_range(EMA + name, value, _begin(optimizer.replicas, name, state) + state.first if state else 0)


def _fill_weight(reader: CheckpointReader, name: str, state: ParameterState, begin: int) -> None:
    """A parameter, which begins at element `begin` of the flattened global one, and this rank's range of its master.

    A master is stored only where the weight was narrower, and then it is the truth and the weight its rounding; else
    the weight is the truth, in whatever precision it was stored.
    """
    truth = MASTER + name if MASTER + name in reader.kinds else name
    parameter = state.parameter.detach().view(-1)
    if not state.has_master:
        reader.fill_range(truth, parameter, begin)
        return
    reader.fill_range(truth, state.master, begin + state.first)
    if reader.kinds[name][1] == parameter.dtype:
        reader.fill_range(name, parameter, begin)
        return
    wide = torch.empty(parameter.shape, dtype=state.master.dtype)  # so that it is the rounding of the master
    reader.fill_range(truth, wide, begin)
    parameter.copy_(wide)


def architecture(config: ModelConfig) -> dict:
    """What must agree for a checkpoint to belong to a model."""
    free = {"name", "mtp_depth_weights", "rope_scaling", "max_position_embeddings", "initializer_range"}
    return {key: value for key, value in asdict(config).items() if key not in free}
