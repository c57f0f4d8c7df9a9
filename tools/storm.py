"""Runs of four ranks in a storm: killed, stopped, without disk, with damaged checkpoints; and yet the right result.

    python tools/storm.py out=tools/results/storm.md
    python tools/storm.py rounds=4 seed=7 layouts=ep4 kinds=kill,stop

A round is one disturbance at a random moment in the training or a save (for `kill`, in the start too):

    kill      kill -9 of one rank: the others end by themselves and name it
    term      SIGTERM to one rank: all finish the same step, save, and end with 0
    stop      SIGSTOP of one rank: the others name it within parallel.timeout (and a margin), and end
    disk      the disk is full: the run lives and says so; once there is room it saves again, or (every second time) it
              is killed without room and started again with it
    flip      all ranks are killed (kill -9), and a bit of the newest checkpoint flips
    cut       the same, and a file of the newest checkpoint is cut
    second    SIGTERM to one rank or three, and another while the save waits for the fourth: they end at once
    torchrun  kill -9 of one rank under launch/torchrun.sh, which starts all again; then SIGTERM to one of these

The rounds of a layout are one run, whose every start must continue from the newest intact checkpoint (storm_judge.py
finds it by itself). At the end the run is finished, and compared with one that nobody disturbed: every bit of weights,
masters, averages, moments, biases and generators, and every line of metrics.jsonl. A round also fails where something
lasts longer than its limit, a process stays, or the run's folder holds anything half at the end. The full disk is a
tmpfs in a mount namespace of its own; where none may be mounted, a limit on the ranks' file sizes. The last line is
JSON.
"""

import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

from storm_disk import in_own_mounts, make_disk
from storm_judge import differences, leftovers
from storm_kinds import KINDS, Outcome, StormyRun
from storm_ranks import Nursery, end_all
from storm_run import Run

DEFAULTS = {"rounds": "52", "seed": "0", "timeout": "10", "layouts": "", "kinds": "", "folder": "", "out": ""}
LAYOUTS = {
    "dualpipe": ["parallel.pp=2", "parallel.schedule=dualpipe"],
    "ep4": ["parallel.ep=4", "precision=bf16"],
    "edp2_ep2": ["parallel.ep=2", "ema.decay=0.9"],
    "dp4": ["precision=bf16", "optim.moments=fp32", "ema.decay=0.9"],
}
SHARES = {"kill": 14, "term": 7, "stop": 8, "disk": 7, "flip": 6, "cut": 4, "second": 4, "torchrun": 2}  # of 52 rounds
SIZE = 4
MODEL = """model=tiny model.hidden_size=32 model.intermediate_size=32 model.moe_intermediate_size=16
    model.vocab_size=320 model.q_lora_rank=16 model.kv_lora_rank=16 model.num_hidden_layers=3"""
WORDS = "def return for in while if else class import self value list 0 1 2 = + ( ) :".split()


def main() -> int:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}")
    names = {"layouts": LAYOUTS, "kinds": KINDS}
    layouts, kinds = (options[key].split(",") if options[key] else list(names[key]) for key in names)
    for key, given in (("layouts", layouts), ("kinds", kinds)):
        if unknown := set(given) - set(names[key]):
            sys.exit(f"{key}={unknown.pop()}: valid: {', '.join(names[key])}")
    in_own_mounts()
    mark = f"{os.getpid()}-{time.time_ns()}"
    folder = Path(options["folder"] or tempfile.mkdtemp(prefix="storm-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(int(options["seed"]))
    text = folder / "text.txt"
    text.write_text("".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) + "\n" for _ in range(1500)))
    rounds = deal(draw, int(options["rounds"]), kinds, layouts)
    begun, outcomes, finals = time.monotonic(), [], {}
    nursery = Nursery(mark)
    try:
        with make_disk(folder / "disk") as disk:
            print(f"storm of {len(rounds)} rounds in {folder}; full disk: {disk.what}", flush=True)
            for layout in layouts:
                mine = [kind for where, kind in rounds if where == layout]
                arguments = [*command(folder, float(options["timeout"])), *LAYOUTS[layout]]
                run = StormyRun(layout, arguments, SIZE, folder, disk, nursery, mark, draw, float(options["timeout"]))
                for kind in mine:
                    outcome = run.round(kind)
                    outcomes.append(outcome)
                    report(len(outcomes), len(rounds), outcome)
                finals[layout] = finish(run, folder)
                print(f"{layout}: {finals[layout]['verdict']}", flush=True)
            stray = end_all(mark, but=nursery.process.pid)
    finally:
        end_all(mark, but=nursery.process.pid)
        nursery.close()
    good = all(not outcome.problems for outcome in outcomes) and all(final["good"] for final in finals.values())
    summary = summarise(outcomes, finals, stray, good and not stray, time.monotonic() - begun)
    page = table(options, summary, disk.what)
    print(page)
    if options["out"]:
        Path(options["out"]).write_text(f"{page}\n\n```json\n{json.dumps(summary)}\n```\n")
    if summary["good"] and not options["folder"]:
        shutil.rmtree(folder)
    print(json.dumps(summary))
    return 0 if summary["good"] else 1


def deal(draw: random.Random, count: int, kinds: list[str], layouts: list[str]) -> list[tuple[str, str]]:
    """`count` rounds as (layout, kind), shuffled; kinds by their shares, each at least once where there is room."""
    deck = [kind for kind in kinds for _ in range(SHARES[kind])]
    hand = kinds[:count]
    while len(hand) < count:  # whichever kind is farthest below its share
        have = Counter(hand)
        hand.append(max(kinds, key=lambda kind: count * SHARES[kind] / len(deck) - have[kind]))
    draw.shuffle(hand)
    return [(layouts[number % len(layouts)], kind) for number, kind in enumerate(hand)]


def command(folder: Path, timeout: float) -> list[str]:
    """A very small run that saves after every second step; the batch grows, the learning rate falls."""
    return f"""{MODEL} data.text={folder}/text.txt data.cache={folder}/cache data.vocab_size=300 data.sequence_length=16
        batch.sequences=16 batch.ramp={{start:8,until:4000,multiple:8}} batch.micro_sequences=1 precision=fp32
        schedule.tokens=1e6 schedule.learning_rate=[{{until:2000,value:1e-3}},{{until:1e6,value:1e-5,shape:cosine}}]
        run.threads=1 run.device=cpu eval.every=0 eval.at_end=false checkpoint.every=2 checkpoint.keep=2
        parallel.timeout={timeout:g} telemetry.peak_tflops=1.0 telemetry.log_every=1""".split()


def report(number: int, of: int, outcome: Outcome) -> None:
    verdict = "ok" if not outcome.problems else "PROBLEM: " + "; ".join(outcome.problems)
    counts = f"{outcome.seconds:.1f} s, {outcome.restarts} restarts, {outcome.lost} steps lost"
    print(f"round {number}/{of}  {outcome.layout}  {outcome.what}: {counts}  {verdict}", flush=True)


def finish(run: Run, folder: Path) -> dict:
    """Train the run to its end, and the same run undisturbed; compare them."""
    problems = run.finish()
    steps = run.state_step()
    calm = Run(run.layout, run.arguments, SIZE, folder / "calm", run.disk, run.nursery, run.mark, run.draw, run.timeout)
    problems += calm.finish(steps)
    compared = {}
    if not problems:
        differ, compared = differences(run.path, calm.path)
        problems = leftovers(run.path, run.damaged) + differ
    kinds = ", ".join(f"{count} {kind}" for kind, count in compared.items() if count)
    good = f"{steps} steps, bit-equal: {kinds} (as the ranks store them)"
    verdict = "PROBLEM: " + "; ".join(problems[:5]) if problems else good
    return {"steps": steps, "compared": compared, "good": not problems, "verdict": verdict}


def summarise(outcomes: list[Outcome], finals: dict, stray: list[int], good: bool, seconds: float) -> dict:
    of_kind = defaultdict(list)
    for outcome in outcomes:
        of_kind[outcome.kind].append(outcome)
    rows = {
        kind: {
            "rounds": len(of), "restarts": sum(o.restarts for o in of),
            "lost_steps_mean": round(statistics.mean(o.lost for o in of), 2), "lost_steps_max": max(o.lost for o in of),
            "seconds_median": round(statistics.median(o.seconds for o in of), 1),
            "seconds_max": round(max(o.seconds for o in of), 1),
            "named_seconds_max": round(max((o.named for o in of if o.named is not None), default=0.0), 1),
            "moments": dict(Counter(o.moment for o in of)),
            "problems": [f"{o.layout}: {o.what}: {problem}" for o in of for problem in o.problems],
        }
        for kind in KINDS if (of := of_kind[kind])
    }
    return {"good": good, "rounds": len(outcomes), "restarts": sum(o.restarts for o in outcomes), "stray": len(stray),
            "seconds": round(seconds), "kinds": rows, "runs": finals}


def table(options: dict, summary: dict, disk: str) -> str:
    what = " ".join(f"{key}={options[key]}" for key in DEFAULTS if options[key] and key not in ("folder", "out"))
    lines = [
        f"`python tools/storm.py {what}`", "",
        f"{platform.machine()}, {os.cpu_count()} cores, {date.today()}; {SIZE} ranks, gloo, a checkpoint every second "
        f"step, parallel.timeout={options['timeout']}. Full disk: {disk}. "
        f"{summary['rounds']} rounds, {summary['restarts']} restarts, {summary['seconds'] / 60:.0f} minutes.", "",
        "| kind | what | rounds | moments | restarts | steps lost, mean (most) | seconds, median (most) | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in summary["kinds"].items():
        moments = ", ".join(f"{count} in {moment}" for moment, count in row["moments"].items())
        verdict = "; ".join(row["problems"]) or "ok"
        if not row["problems"] and row["named_seconds_max"]:
            verdict = f"ok; the rank was named after at most {row['named_seconds_max']} s"
        lines.append(
            f"| {kind} | {KINDS[kind]} | {row['rounds']} | {moments} | {row['restarts']} | {row['lost_steps_mean']} "
            f"({row['lost_steps_max']}) | {row['seconds_median']} ({row['seconds_max']}) | {verdict} |"
        )
    lines += ["", "| layout | the finished run beside one that nobody disturbed |", "|---|---|"]
    lines += [f"| {' '.join(LAYOUTS[layout])} | {final['verdict']} |" for layout, final in summary["runs"].items()]
    stray = f"{summary['stray']} stray processes" if summary["stray"] else "No stray process"
    return "\n".join([*lines, "", f"{stray}. {'All as it must be.' if summary['good'] else 'NOT AS IT MUST BE.'}"])


if __name__ == "__main__":
    sys.exit(main())
