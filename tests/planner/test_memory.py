"""planner/memory.py and activations.py against bytes that the training code really holds, counted on small models."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.config.compose import compose
from dstrain.model.batch import MicroBatch
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.passes import Job as PassJob
from dstrain.model.unit import Unit
from dstrain.model.units import Chunk
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.parallel.group import Group
from dstrain.parallel.layout import Layout
from dstrain.parallel.replicas import Replicas
from dstrain.parallel.schedules.build import build_schedule, stages_on
from dstrain.planner.activations import kept_bytes
from dstrain.planner.holdings import holdings
from dstrain.planner.job import Job
from dstrain.planner.memory import _alive, alive_at_once, state_bytes
from dstrain.precision.policy import resolve_precision
from dstrain.train.state import build_state

SMALL = ["model=tiny", "cluster=cpu_2cores", "cluster.fp8_tflops=1", "run.device=cpu", "batch.sequences=64",
         "batch.micro_sequences=2", "data.sequence_length=128"]
LAYOUTS = {
    "data parallel": ["cluster.gpus=4"],
    "experts": ["cluster.gpus=4", "parallel.ep=4"],
    "pipeline": ["cluster.gpus=2", "parallel.pp=2", "parallel.schedule=1f1b"],
    "dualpipe": ["cluster.gpus=8", "parallel.pp=4", "parallel.ep=2", "parallel.schedule=dualpipe"],
    "dualpipev": ["cluster.gpus=4", "parallel.pp=2", "parallel.ep=2", "parallel.schedule=dualpipev"],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_gradients_and_optimizer_of_every_pipeline_rank(layout, precision, monkeypatch):
    """Right values: the buffers of a training rank, made by the training code without the process groups."""
    config = compose("plan", [*SMALL, *LAYOUTS[layout], f"precision={precision}"])[0]
    monkeypatch.setattr(Replicas, "group", lambda self, name: Group(self.ranks(name), self.mesh.rank))
    job = Job.of(config)
    mesh = job.layout.mesh
    for pp_rank, held in enumerate(holdings(job)):
        rank = Layout(config, mesh.world_size, pp_rank * mesh.dp, 8)
        chosen = resolve_precision(precision, torch.device("cpu"))
        _, optimizer = build_state(config, chosen, torch.device("cpu"), rank.replicas)
        weights = sum(bucket.weights.nbytes for bucket in optimizer.buckets)
        gradients = sum(bucket.grads.nbytes for bucket in optimizer.buckets)
        state = sum(s.exp_avg.nbytes + s.exp_avg_sq.nbytes + (s.master.nbytes if s.has_master else 0)
                    for s in optimizer.states.values())
        # the buffers begin parameters at multiples of 64 elements and end in equal parts
        assert state_bytes(job, held) == pytest.approx((weights, gradients, state), rel=0.01)


class Storages(TorchDispatchMode):
    """Every storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.made.add(StorageWeakRef(x.untyped_storage()))
        return out


def kept_by_a_chunk(config, units) -> int:
    """Bytes that live between a chunk's forward and its backward, without its output, which the next one counts."""
    torch.manual_seed(0)
    precision = resolve_precision(config.precision.name, torch.device("cpu"), "emulated") if (
        config.precision.name == "fp8") else resolve_precision(config.precision.name, torch.device("cpu"))
    model, _ = build_state(config, precision, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    depth, length = config.model.num_nextn_predict_layers, config.data.sequence_length
    tokens = torch.randint(0, config.model.vocab_size, (config.batch.micro_sequences, length + 1 + depth))
    batch = MicroBatch(tokens, torch.zeros_like(tokens), depth, False)
    weights = LossWeights.of_batch([1] * (depth + 1), 1, 0.3, config.model.depth_weights, 1e-4)
    sums = LossSums(depth, torch.device("cpu"))
    hidden = None
    if units[0].kind != "embed":
        hidden = torch.randn(len(tokens), length, config.model.hidden_size, dtype=model.dtype)

    def run(one):
        recompute = config.parallel.recompute == "block"
        chunk = Chunk(PassJob(model, batch, LocalDispatcher(), sums, weights, recompute), units)
        return chunk, chunk.forward(one)

    run(hidden)  # what is made once, such as quantised weights, is there now
    with Storages() as storages:
        chunk, out = run(None if hidden is None else hidden.clone())
    others = [out, sums.balance, sums.depths, tokens, *model.buffers()]
    for parameter in model.parameters():
        operands = getattr(parameter, "fp8_operands", None) or ()
        others += [parameter, parameter.main_grad, *(x for pair in operands for x in pair if x is not None)]
    outside = {StorageWeakRef(x.untyped_storage()) for x in others}
    gc.collect()
    alive = [storage for storage in storages.made if not storage.expired() and storage not in outside]
    return sum(torch.UntypedStorage._new_with_weak_ptr(storage.cdata).nbytes() for storage in alive)


UNITS = {
    "dense block": [Unit("block", 0)],
    "MoE blocks": [Unit("block", 1), Unit("block", 2)],
    "ends": [Unit("embed"), Unit("block", 0), Unit("block", 1)],
    "head and MTP": [Unit("block", 3), Unit("head"), Unit("mtp", 1)],
}


@pytest.mark.parametrize("more", [["precision=fp32"], ["precision=bf16"], ["precision=fp8"],
                                  ["precision=fp32", "parallel.recompute=block"]], ids=lambda more: more[-1])
@pytest.mark.parametrize("units", UNITS)
def test_activations_of_a_chunk(units, more):
    config = compose("plan", [*SMALL, "cluster.gpus=1", *more])[0]
    job = Job.of(config)
    planned = sum(kept_bytes(job, unit) for unit in UNITS[units])
    counted = kept_by_a_chunk(config, UNITS[units])
    assert planned == pytest.approx(counted, rel=0.04 if "recompute" in more[-1] else 0.02)


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zb1p", 5), ("dualpipe", 6), ("dualpipev", 3)])
def test_most_is_alive_with_twice_as_many_micro_batches_as_ranks(name, ranks):
    few = build_schedule(name, ranks, 2 * ranks)
    many = build_schedule(name, ranks, 5 * ranks + ranks % 2)
    for rank in range(ranks):
        own = stages_on(name, ranks, rank)
        assert set(_alive(few.actions[rank], own)) == set(_alive(many.actions[rank], own))
    most = [max(sum(forwards for forwards, _ in one) for one in _alive(actions, stages_on(name, ranks, rank)))
            for rank, actions in enumerate(few.actions)]
    assert most == few.most_alive


def test_a_pipeline_rank_counts_its_own_list():
    """1F1B on two ranks: the first holds two micro-batches of its stage, the last one."""
    config = compose("plan", [*SMALL, *LAYOUTS["pipeline"]])[0]
    assert alive_at_once(Job.of(config)) == [[((2, 0),)], [((1, 0),)]]
