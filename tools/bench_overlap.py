"""How much communication an overlapped pair hides, measured: DualPipe on real processes, with a wire that takes time.

    python tools/bench_overlap.py
    python tools/bench_overlap.py ratio=1.2 rounds=9 out=tools/results/overlap_cpu.md
    python tools/bench_overlap.py clock=own      # on a machine that others use too
    python tools/bench_overlap.py clock=own ep=2 latency_ms=20 sequence=768 experts=512 micro_batches=6 rounds=3

Every rank is a process of one thread. With ep=1 its experts are its own, but dispatch and combine go over a wire
(tests/delays.py) of the given latency; whoever waits for the wire sleeps. With ep=2 two ranks share the experts of
each pipeline rank and the dispatcher is the real one: all its exchanges, the counts of a layer's rows too, go through
gloo and over the wire; latencies of exchanges that follow each other overlap, bytes do not. experts: their inner
size. A round is three steps: one without delay,
from which the wire gets the bandwidth that makes a pair's communication take `ratio` times its computation, one without
overlap and one with. Reported are the medians over rounds of a round's median pair, so that a disturbance of the
machine spoils one round. Time that a rank waits for another rank's hidden states is not counted. clock=wall is real
time and needs an idle core for each rank; clock=own counts a rank's time on its core and adds the waits for the wire.
The last line is JSON.

    hidden share = 1 - (seconds waited for the wire) / (seconds of the wire)
"""

import json
import os
import platform
import statistics
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
import torch.distributed as dist
from delays import DelayedDispatcher, OwnClock, WallClock, Wire, slow_down
from oracle import tiny_config
from ranks import spawn

from dstrain.model.batch import MicroBatch
from dstrain.model.init import initial_value
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.share import Share
from dstrain.model.unit import list_units
from dstrain.parallel import executor as executing
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.payload import PAYLOADS
from dstrain.parallel.replicas import is_expert
from dstrain.parallel.schedules.build import build_schedule
from dstrain.parallel.schedules.messages import messages
from dstrain.parallel.transfer import Channels, Transfer
from dstrain.precision.main_grad import attach_main_grads

DEFAULTS = {
    "schedule": "dualpipe", "ranks": "2", "micro_batches": "12", "layers": "4", "hidden": "256", "sequence": "256",
    "ep": "1", "experts": "128",
    "ratio": "0.9", "latency_ms": "0.5", "rounds": "5", "clock": "wall", "timeout": "900", "out": "",
}
DEVICE = torch.device("cpu")


def main() -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    of_ranks = spawn(measure, int(options["ranks"]) * int(options["ep"]), options, timeout=float(options["timeout"]))
    summary = summarise(of_ranks)
    text = table(options, summary)
    print(text)
    if options["out"]:
        Path(options["out"]).write_text(f"{text}\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))


def measure(rank: int, size: int, options: dict) -> list[dict[str, list]]:
    """One rank. -> by round and kind of step: each pair's seconds, seconds of the wire, seconds waited for the wire."""
    wire = Wire(0.0, float("inf"), {"wall": WallClock, "own": OwnClock}[options["clock"]]())
    step = prepare(rank, size, options, wire)
    step(False)  # to warm up
    rounds = []
    for _ in range(int(options["rounds"])):
        wire.latency, wire.bandwidth = 0.0, float("inf")
        of_round = {"free": step(False)}
        # From the mean over the ranks, so that all have the same wire.
        mean = torch.tensor([statistics.median(pair[0] for pair in of_round["free"]), wire.nbytes / wire.messages])
        dist.all_reduce(mean)
        seconds, nbytes = (mean / size).tolist()
        wire.latency = float(options["latency_ms"]) / 1e3
        messages = (4 if options["ep"] == "1" else 5) * int(options["layers"])
        wire.bandwidth = nbytes / (float(options["ratio"]) * seconds / messages - wire.latency)
        if wire.bandwidth < 0:
            raise ValueError(f"{messages} messages of {options['latency_ms']} ms take longer than ratio allows: "
                             f"a pair computes for {seconds:.3f} s; take a larger sequence")
        rounds.append(of_round | {"plain": step(False), "overlap": step(True)})
    return rounds


def prepare(rank: int, size: int, options: dict, wire: Wire):
    """-> step(overlap): train on one batch. -> what every pair took."""
    ep, pp = int(options["ep"]), int(options["ranks"])
    schedule = build_schedule(options["schedule"], pp, int(options["micro_batches"]))
    rank, expert_rank = divmod(rank, ep)
    layers, hidden = int(options["layers"]), int(options["hidden"])
    config = tiny_config(
        vocab_size=256, hidden_size=hidden, moe_intermediate_size=int(options["experts"]),
        num_hidden_layers=layers * schedule.stages, first_k_dense_replace=0, num_attention_heads=8,
        q_lora_rank=hidden // 2, kv_lora_rank=hidden // 4, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        n_shared_experts=1, num_nextn_predict_layers=0, max_position_embeddings=int(options["sequence"]),
    )
    units = list_units(config)
    blocks = [units[1:-1][first : first + layers] for first in range(0, len(units) - 2, layers)]
    stages = [[units[0], *blocks[0]], *blocks[1:-1], [*blocks[-1], units[-1]]]
    mine = [unit for stage in schedule.stages_of(rank) for unit in stages[stage]]
    count = config.n_routed_experts // ep
    experts = range(expert_rank * count, (expert_rank + 1) * count)
    model = Model(config, torch.float32, Share.of_units(config, mine, experts))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            first = experts.start if is_expert(name) else 0
            parameter.copy_(initial_value(name, parameter.shape, config, 1, torch.float32, first))
    attach_main_grads(model, torch.float32)
    pipelines = [list(range(i, size, ep)) for i in range(ep)]
    channels = Channels(set(messages(schedule).order), pipelines, float(options["timeout"]), DEVICE)
    if ep == 1:
        dispatcher = DelayedDispatcher(LocalDispatcher(), wire)
    else:
        groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, size, ep)]
        dispatcher = AllToAllDispatcher(groups[rank], ep, PAYLOADS["compute"], DEVICE)
        slow_down(dispatcher.link, wire)
    executor = executing.Executor(schedule, rank, model, stages, dispatcher, channels)
    shape = (schedule.micro_batches, 1, int(options["sequence"]) + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(1 + expert_rank))
    batches = [MicroBatch(t, torch.zeros_like(t), 0) for t in tokens]
    weights = LossWeights.of_batch([tokens.numel()], len(tokens), 0.0, [], 0.0)

    def step(overlap: bool) -> list:
        executor.overlap, pairs = overlap, []
        write_times(pairs, wire)
        dist.barrier()
        executor.train(batches, LossSums(0, DEVICE), weights, step=1)
        return pairs

    return step


PAIR, RECEIVE = executing._Run._pair, Transfer.receive


def write_times(pairs: list, wire: Wire) -> None:
    """From now on every pair writes down its times."""
    received = 0.0

    def receive(self, message):
        nonlocal received
        start = wire.clock.now()
        tensor = RECEIVE(self, message)
        received += wire.clock.now() - start
        return tensor

    def pair(self, *works):
        nonlocal received
        received, communication, exposed, start = 0.0, wire.communication, wire.exposed, wire.clock.now()
        PAIR(self, *works)
        seconds = wire.clock.now() - start - received
        pairs.append((seconds, wire.communication - communication, wire.exposed - exposed))

    Transfer.receive, executing._Run._pair = receive, pair


def summarise(of_ranks: list[list[dict[str, list]]]) -> dict:
    """Milliseconds; each a median over rounds, of a round's median over the pairs of all ranks."""
    rounds = []
    for of_round in zip(*of_ranks):
        pairs = {kind: [pair for rank in of_round for pair in rank[kind]] for kind in of_round[0]}
        rounds.append({kind: [1e3 * statistics.median(column) for column in zip(*pairs[kind])] for kind in pairs})

    def median(value) -> float:
        return statistics.median(value(of_round) for of_round in rounds)

    kinds = ("plain", "overlap")
    return {
        "computation_ms": median(lambda r: r["free"][0]),
        "communication_ms": median(lambda r: r["overlap"][1]),
        "pair_ms": {kind: median(lambda r: r[kind][0]) for kind in kinds},
        "exposed_ms": {kind: median(lambda r: r[kind][2]) for kind in kinds},
        "hidden_share": median(lambda r: 1 - r["overlap"][2] / r["overlap"][1]),
        "speedup": median(lambda r: r["plain"][0] / r["overlap"][0]),
        "rounds": [{"hidden_share": round(1 - r["overlap"][2] / r["overlap"][1], 4),
                    "speedup": round(r["plain"][0] / r["overlap"][0], 3)} for r in rounds],
    }


def table(options: dict, summary: dict) -> str:
    what = ", ".join(f"{key}={options[key]}" for key in DEFAULTS if key not in ("timeout", "out"))
    lines = [
        f"Overlapped pairs: {what}", "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}, "
        f"{date.today()}. A pair alone: {summary['computation_ms']:.0f} ms of computation, "
        f"{summary['communication_ms']:.0f} ms of communication.", "",
        "| pair | ms | waiting for the wire, ms |", "|---|---|---|",
    ]
    for kind, name in (("plain", "forward, then backward"), ("overlap", "overlapped")):
        lines.append(f"| {name} | {summary['pair_ms'][kind]:.1f} | {summary['exposed_ms'][kind]:.1f} |")
    share, speedup = summary["hidden_share"], summary["speedup"]
    return "\n".join([*lines, "", f"{share:.1%} of the communication is hidden; pairs are {speedup:.2f} times faster."])


if __name__ == "__main__":
    main()
