"""The overlapped pair: its order, its time with the published medians on a clock of our own, and equal bits."""

import random

import pytest
import torch
from delays import DelayedDispatcher, Wire
from oracle import tiny_config
from pipelines import CONFIG, DEVICE, build, loss_weights, make_batches, results

from dstrain.model.block import BlockPass
from dstrain.model.loss import LossSums
from dstrain.model.passes import Job
from dstrain.model.unit import list_units
from dstrain.model.units import BackwardWay, Chunk, ForwardWay
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.parallel.overlap import issue_order, run_pair
from dstrain.parallel.schedules.pair import pair_order, simulate_pair, taken_by
from dstrain.precision import main_grad
from dstrain.precision.main_grad import WeightGradQueue

# REFERENCE §4: median milliseconds of a layer.
MEDIANS = {
    "attention F": 4.36, "attention B": 9.41, "attention W": 2.39,
    "experts F": 4.50, "experts B": 5.41, "experts W": 6.22,
    "dispatch F": 6.57, "combine F": 8.89, "dispatch B": 7.39, "combine B": 5.72,
}


def test_one_layer_is_issued_with_every_communication_behind_what_makes_its_input():
    text = [str(operation.phase) for operation in issue_order(pair_order(1, 1))]
    assert text == [
        "combine(B)", "attention(F)", "dispatch(F)", "experts(B)", "dispatch(B)", "experts(W)", "experts(F)",
        "combine(F)", "attention(B)", "attention(W)",
    ]


@pytest.mark.parametrize("forward", range(5))
@pytest.mark.parametrize("backward", range(5))
def test_issuing_early_changes_neither_streams_order_nor_any_time(forward, backward):
    """On two streams the published order's times are the right ones, for any durations."""
    published = pair_order(forward, backward)
    issued = issue_order(published)
    assert sorted(map(str, issued)) == sorted(map(str, published))
    for communicates in (True, False):
        of_stream = [[op for op in order if op.phase.communicates == communicates] for order in (issued, published)]
        assert of_stream[0] == of_stream[1]
    for operation, before in zip(issued[1:], issued):
        if operation.phase.communicates:
            assert taken_by(operation) == before
    draw = random.Random(forward * 5 + backward)
    seconds = {operation: draw.random() for operation in published}
    assert simulate_pair(issued, seconds.get).start == simulate_pair(published, seconds.get).start


class HandClock:
    """Moves only when it is told to."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, when: float) -> None:
        self.time = max(self.time, when)


class MedianWire(Wire):
    def __init__(self, clock, factor: float):
        super().__init__(0.0, 1.0, clock)
        self.factor = factor

    def seconds(self, phase, nbytes):
        return MEDIANS[phase] * self.factor


def charge(monkeypatch, clock):
    """From now on computing phases take their medians on `clock`. A phase waits for its input first, then computes."""

    def charged(function, *names):
        def call(self, *arguments):
            result = function(self, *arguments)
            split = main_grad._open_chunk is not None
            clock.time += sum(MEDIANS[name] for name in names if not (split and name.endswith("W")))
            return result

        return call

    monkeypatch.setattr(BlockPass, "attention", charged(BlockPass.attention, "attention F"))
    monkeypatch.setattr(BlockPass, "experts", charged(BlockPass.experts, "experts F"))
    backward = charged(BlockPass.experts_backward, "experts B", "experts W")
    monkeypatch.setattr(BlockPass, "experts_backward", backward)
    backward = charged(BlockPass.attention_backward, "attention B", "attention W")
    monkeypatch.setattr(BlockPass, "attention_backward", backward)
    pop = WeightGradQueue.pop
    popped = []

    def charged_pop(queue):
        popped.append(None)
        clock.time += MEDIANS["experts W" if len(popped) % 2 else "attention W"]
        pop(queue)

    monkeypatch.setattr(WeightGradQueue, "pop", charged_pop)


@pytest.mark.parametrize(
    "overlap, factor, expected", [(True, 1.0, 130.5), (False, 1.0, 243.4), (True, 1.5, 171.4), (True, 2.0, 228.6)]
)
def test_a_pair_of_four_layers_takes_the_published_time(monkeypatch, overlap, factor, expected):
    """The blocks' own phases and waits, run for real; only the clock is made. Published order and medians: 130.5 ms."""
    config = tiny_config(first_k_dense_replace=0, num_hidden_layers=4, num_nextn_predict_layers=0)
    units = [unit for unit in list_units(config) if unit.kind == "block"]
    model, clock = build(config, "fp64"), HandClock()
    batches = make_batches(config, 2)
    sums, weights = LossSums(0, DEVICE), loss_weights(config, batches)
    hidden = [torch.randn(len(b.tokens), b.length, config.hidden_size, dtype=torch.float64) for b in batches]
    other = Chunk(Job(model, batches[0], DelayedDispatcher(LocalDispatcher(), Wire(0, 1, clock)), sums, weights), units)
    out = other.forward(hidden[0])
    wire = MedianWire(clock, factor)
    for one in other.passes:
        one.route.wire = wire
    clock.time = 0.0
    charge(monkeypatch, clock)
    chunk = Chunk(Job(model, batches[1], DelayedDispatcher(LocalDispatcher(), wire), sums, weights), units)
    if overlap:
        way, back = ForwardWay(chunk, hidden[1]), BackwardWay(other, torch.ones_like(out), split=True)
        run_pair(way, back)
        back.finish()
        way.finish()
    else:
        chunk.forward(hidden[1])
        other.backward(torch.ones_like(out))
    assert clock.time == pytest.approx(expected, rel=0.01)
    assert wire.communication == pytest.approx(4 * factor * (6.57 + 8.89 + 7.39 + 5.72))
    if overlap and factor == 1.0:
        assert 1 - wire.exposed / wire.communication > 0.963  # of the trace; here all but the first combine is hidden


# Stages of unlike lengths: units of CONFIG are embed, blocks 0 … 3 (block 0 dense), head, mtp 1 … 4.
STAGES = {
    "embed and two blocks": (0, 3), "head alone": (5, 6), "block": (4, 5), "blocks and head": (2, 6), "modules": (6, 9),
}


@pytest.mark.parametrize("backward", STAGES)
@pytest.mark.parametrize("forward", STAGES)
def test_pairs_of_any_two_stages_give_equal_bits(forward, backward):
    whole = [run_two(forward, backward, overlap) for overlap in (True, False)]
    for key in ("losses", "hidden", "grad"):
        assert (whole[0][key] is None) == (whole[1][key] is None)
        assert whole[0][key] is None or torch.equal(whole[0][key], whole[1][key])
    for name, grad in whole[1]["grads"].items():
        assert torch.equal(whole[0]["grads"][name], grad), name


def run_two(forward, backward, overlap):
    """One chunk forward and another back, between each other or one after the other."""
    model, units, batches = build(CONFIG, "fp32"), list_units(CONFIG), make_batches(CONFIG, 2)
    sums, weights = LossSums(CONFIG.num_nextn_predict_layers, DEVICE), loss_weights(CONFIG, batches)
    generator = torch.Generator().manual_seed(11)

    def chunk(stage, batch):
        first, last = STAGES[stage]
        return Chunk(Job(model, batch, LocalDispatcher(), sums, weights), units[first:last])

    def random_state(stage, batch):
        shape = (len(batch.tokens), batch.length, CONFIG.hidden_size)
        return None if stage.startswith("embed") else torch.randn(shape, generator=generator)

    one, other = chunk(forward, batches[1]), chunk(backward, batches[0])
    hidden = random_state(forward, batches[1])
    out = other.forward(random_state(backward, batches[0]))
    grad = torch.randn(out.shape, generator=generator)
    if overlap:
        way, back = ForwardWay(one, hidden), BackwardWay(other, grad, split=True)
        run_pair(way, back)
        grad, hidden = back.finish(), way.finish()
        assert len(back.queue) == 0
    else:
        hidden, grad = one.forward(hidden), other.backward(grad)
    return results(model, sums) | {"hidden": hidden, "grad": grad}


@pytest.mark.parametrize("there", [True, False])
def test_a_dispatch_whose_counts_are_late_starts_behind_the_experts_of_the_other_chunk(there):
    """Nothing else changes its place; the longer forward's layers without a partner start theirs before the experts."""
    done = []

    class Way:
        blocks = 2

        def __init__(self, part, blocks):
            self.part, self.blocks = part, blocks

        def dispatch_is_ready(self):
            return there

        def __getattr__(self, name):
            return lambda: done.append(f"{name} {self.part}")

    run_pair(Way("F", 2), Way("B", 1))
    start = ["combine B", "attention F"]
    pair = ["dispatch F", "experts B"] if there else ["experts B", "dispatch F"]
    rest = ["dispatch B", "weights B", "experts F", "combine F", "attention B", "weights B"]
    assert done == start + pair + rest + ["attention F", "dispatch F", "experts F", "combine F"]
