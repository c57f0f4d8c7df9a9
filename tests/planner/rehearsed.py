"""Real ranks that count what a rehearsal says: bytes that PyTorch's CPU allocator gave, messages as they were sent."""

import ctypes
from collections import Counter

import torch
import torch.distributed as dist
from helpers import RandomStream
from torch.profiler import ProfilerActivity, profile

from dstrain.config.compose import compose
from dstrain.model.router import Router
from dstrain.parallel.group import Group
from dstrain.parallel.layout import Layout
from dstrain.planner.job import Job
from dstrain.planner.rehearsal.loads import routing_table
from dstrain.planner.rehearsal.rank import short_job
from dstrain.precision.policy import resolve_precision
from dstrain.train.state import RunState, build_state, initialise
from dstrain.train.step import Stepper

SMALL = ["model=tiny", "cluster=cpu_2cores", "run.device=cpu", "batch.sequences=64", "batch.micro_sequences=2",
         "data.sequence_length=128", "precision=fp32"]


def job_of(*overrides):
    return short_job(Job.of(compose("plan", [*SMALL, *overrides])[0]))


def real_rank(rank, size, overrides, load):
    """Of a step: bytes of weights, gradients and optimizer, the most that it had beside them, messages
    {(what, shape, type): times}, bytes of dispatch by phase and link, and the counts that the dispatcher read."""
    job = job_of(*overrides)
    config, device = job.config, torch.device("cpu")
    layout = Layout(config, size, rank, job.cluster.gpus_per_node)
    layout.connect(device)
    ids = torch.from_numpy(routing_table(load, config.model, job.tokens, layout.mesh.ep_rank).copy())
    Router.select = lambda self, scores: ids.view(*scores.shape[:-1], -1)
    precision = resolve_precision(config.precision.name, device)
    model, optimizer = build_state(config, precision, device, layout.replicas)
    initialise(model, optimizer, seed=1)
    dispatcher = layout.dispatcher(device, precision.compute)
    lend_buffers()
    counts = watch_counts(dispatcher)
    stepper = Stepper(config, model, optimizer, dispatcher, RandomStream(config, config.model.vocab_size), layout)
    stepper.traffic = dict  # left for us to read
    sent = watch_messages(optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stepper.step(RunState())
    held = {
        "weights": sum(b.weights.nbytes for b in optimizer.buckets) + sum(b.nbytes for b in model.buffers()),
        "gradients": sum(bucket.grads.nbytes for bucket in optimizer.buckets),
        "optimizer": sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                          for s in optimizer.states.values() for x in (s.exp_avg, s.exp_avg_sq)}.values()),
    }
    return held, peak_bytes(profiler), dict(sent), dispatcher.traffic.metrics(), counts


def peak_bytes(profiler) -> int:
    """Of everything that was allocated inside."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


class Held:
    """A collective and its buffers, which live until both are let go of."""

    def __init__(self, work: dist.Work, *buffers: torch.Tensor):
        self.work, self.buffers = work, buffers
        self.wait, self.is_completed = work.wait, work.is_completed


def lend_buffers() -> None:
    """From here on gloo neither holds nor allocates memory, so that a peak is the same every time.

    Else the thread of gloo that ran an exchange lets go of its rows when it is next given time, on a busy machine long
    after the caller went on (up to 1.18 times the peak), and a reduce-scatter works in a copy of the gradients (1.36).
    """
    exchange = dist.all_to_all_single

    def at(buffer: torch.Tensor) -> torch.Tensor:
        assert buffer.dtype == torch.uint8 and buffer.is_contiguous()
        if not buffer.numel():
            return torch.empty_like(buffer)
        memory = (ctypes.c_uint8 * buffer.numel()).from_address(buffer.data_ptr())
        return torch.frombuffer(memory, dtype=torch.uint8).view(buffer.shape)

    def all_to_all_single(incoming, outgoing, *args, **kwargs):
        return Held(exchange(at(incoming), at(outgoing), *args, **kwargs), incoming, outgoing)

    def reduce_scatter(group, flat, what):
        return group._start(lambda: dist.all_reduce(flat, group=group.handle, async_op=True), what)

    dist.all_to_all_single, Group.reduce_scatter = all_to_all_single, reduce_scatter


def watch_counts(dispatcher) -> list:
    found, read = [], dispatcher.host_counts
    dispatcher.host_counts = lambda counts: (found.append(counts.numpy().copy()), read(counts))[1]
    return found


def watch_messages(optimizer) -> Counter:
    """Everything that this process sends from here on, by what it is."""
    sent, weights = Counter(), {bucket.weights.data_ptr() for bucket in optimizer.buckets}

    def note(what, tensor):
        sent[what, tuple(tensor.shape), tensor.dtype] += 1

    def before(owner, name, look):
        plain = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (look(*args), plain(*args, **kwargs))[1])

    def of_group(what):
        def look(group, tensor, words):
            if group.size > 1:
                note("weights" if tensor.data_ptr() in weights else what, tensor)
        return look

    before(Group, "reduce_scatter", of_group("gradients"))
    before(Group, "all_gather", of_group("totals"))
    before(Group, "all_reduce", of_group("totals"))
    before(dist, "isend", lambda tensor, *_: note("pipeline", tensor))
    before(dist, "all_to_all_single", lambda incoming, outgoing, *_: note("experts", outgoing))
    return sent
