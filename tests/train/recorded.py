"""Optimizer steps of one layout, recorded so that any two layouts can be compared parameter by parameter."""

import math

import torch
from helpers import RandomStream

from dstrain.parallel.layout import Layout
from dstrain.precision.policy import resolve_precision
from dstrain.train.state import RunState, build_state, initialise
from dstrain.train.step import Stepper


class NotedStream(RandomStream):
    """Writes down which samples it was asked for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.samples = []

    def batch(self, first, count):
        self.samples += range(first, first + count)
        return super().batch(first, count)


class Recorder:
    """One rank of a run on random tokens. Tensors come back as {name: (begin in the flattened whole, values)}."""

    def __init__(self, config, precision="fp64", size=1, rank=0):
        chosen = resolve_precision(precision, torch.device("cpu"))
        self.layout = Layout(config, size, rank, local_size=size)  # one machine, unless ranks_per_node says otherwise
        self.layout.connect(torch.device("cpu"))
        self.model, self.optimizer = build_state(config, chosen, torch.device("cpu"), self.layout.replicas)
        initialise(self.model, self.optimizer, seed=1)
        dispatcher = self.layout.dispatcher(self.model.device, chosen.compute)
        self.stream = NotedStream(config, config.model.vocab_size)
        self.stepper = Stepper(config, self.model, self.optimizer, dispatcher, self.stream, self.layout)
        self.state = RunState()
        norm = self.optimizer.grad_norm
        self.optimizer.grad_norm = lambda: (norm(), self._keep_grads())[0]

    def _keep_grads(self):
        self.grads = self._parts(lambda state: state.grad)

    def _parts(self, of):
        replicas, parts = self.optimizer.replicas, {}
        for name, state in self.optimizer.states.items():
            if state.weight.numel():
                begin = replicas.first(name) * math.prod(state.parameter.shape[1:]) + state.first
                parts[name] = (begin, of(state).clone())
        return parts

    def steps(self, count):
        """Per step: unclipped gradients summed over replicas, metrics, changes of the masters, biases by layer, and
        (data rank, the samples that this rank read).
        """
        history = []
        for _ in range(count):
            before = self._parts(lambda state: state.master)
            metrics = self.stepper.step(self.state)
            after = self._parts(lambda state: state.master)
            change = {name: (begin, after[name][1] - values) for name, (begin, values) in before.items()}
            biases = {layer: router.e_score_correction_bias.clone()
                      for layer, router in zip(self.model.moe_layers, self.model.routers)}
            history.append((self.grads, metrics, change, biases, (self.layout.mesh.data_rank, self.stream.samples)))
            self.stream.samples = []
        return history


def whole(parts_of_ranks):
    """{name: (begin, values)} of every rank -> {name: flattened whole}; each element comes from exactly one rank."""
    pieces = {}
    for parts in parts_of_ranks:
        for name, piece in parts.items():
            pieces.setdefault(name, []).append(piece)
    joined = {}
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        for (begin, values), (following, _) in zip(found, found[1:]):
            assert begin + len(values) == following, name
        joined[name] = torch.cat([values for _, values in found])
    return joined


def samples_by_data_rank(samples_of_ranks):
    """[(data rank, samples)] of every rank -> {data rank: samples}; pipeline ranks of one data rank read the same."""
    found = {}
    for data_rank, samples in samples_of_ranks:
        assert found.setdefault(data_rank, samples) == samples, f"data rank {data_rank}"
    return found


def assert_same_run(histories, reference, loss=1e-12, grad=1e-9, change=1e-7):
    """histories: of every rank. reference: of the single process."""
    for step, (grads, metrics, changes, biases, (_, samples)) in enumerate(reference):
        ranks = [history[step] for history in histories]
        read = samples_by_data_rank([r[4] for r in ranks])
        assert sorted(i for part in read.values() for i in part) == samples  # all, each by one data rank
        got, expected = whole([r[0] for r in ranks]), whole([grads])
        assert got.keys() == expected.keys()
        for name in expected:
            scale = expected[name].abs().max().clamp_min(1e-30)
            assert (got[name] - expected[name]).abs().max() / scale < grad, f"step {step}, gradient of {name}"
        if change is not None:
            got, expected = whole([r[2] for r in ranks]), whole([changes])
            for name in expected:
                assert (got[name] - expected[name]).norm() <= change * expected[name].norm(), f"step {step}, {name}"
        for rank in ranks:
            for key in ("loss", "loss_main", "loss_balance", *range(len(metrics["loss_mtp"]))):
                a, b = (m["loss_mtp"][key] if isinstance(key, int) else m[key] for m in (rank[1], metrics))
                assert abs(a - b) <= loss * abs(b), f"step {step}, {key}"
            assert abs(rank[1]["grad_norm"] - metrics["grad_norm"]) < grad * metrics["grad_norm"]
            equal = "moe_load", "samples", "tokens", "lr", "bias_speed", "mtp_weight", "batch_sequences", "skipped"
            for key in equal:
                assert rank[1][key] == metrics[key], f"step {step}, {key}"
            for layer, bias in rank[3].items():
                assert torch.equal(bias, biases[layer]), f"step {step}, bias of layer {layer}"
