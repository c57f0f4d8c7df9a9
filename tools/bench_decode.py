"""Decoding beside transformers' `generate` with the same weights: prefill and decode apart, with MTP drafts and without.

    python tools/bench_decode.py                                # bench_81m with random weights, bf16, batch 1 and 8
    python tools/bench_decode.py precisions=bf16,fp32 drafts=0,1 rounds=9 out=tools/results/decode_cpu.md
    python tools/bench_decode.py checkpoint=runs/small precisions=fp32 batches=1 drafts=0,1 peers=none prompts=50
    python tools/bench_decode.py peers=none rounds=1 contexts=128,1024,4096,8192      # time per token by context

Every contestant is a process of its own with the weights of one checkpoint, transformers with those of its export, in its
fastest setting. Each round all of them continue the same prompts greedily, one after the other: figures are medians of the
rounds, and what compares two of them is the median of its ratios in each round. Prompts are random tokens, or with
`checkpoint` pieces of held-out documents, evenly spread over the run's own corpus or the token files `heldout`. A step is
one pass of the main model; with drafts it gives 1 + a tokens and takes c times as long, so that (1 + a) / c is to be
expected; what is measured is tokens per second.
"""

import bisect
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_step import ALLOCATOR, cpu_name

DEFAULTS = {
    "model": "bench_81m", "checkpoint": "", "heldout": "", "batches": "1,8", "prompt": "128", "new": "128", "prompts": "",
    "precisions": "bf16", "peers": "transformers", "drafts": "0", "rounds": "5", "threads": "2", "contexts": "",
    "compile": "true", "timeout": "900", "out": "",
}


def main() -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}")
    os.environ |= ALLOCATOR | {"OMP_NUM_THREADS": options["threads"]}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options["checkpoint"] or random_checkpoint(options, Path(folder))
        rows, growth = [], []
        for precision in options["precisions"].split(","):
            for batch in map(int, options["batches"].split(",")):
                rows += compare(options, checkpoint, Path(folder), precision, batch)
            if options["contexts"]:
                growth.append({"precision": precision, "rows": by_context(options, checkpoint, precision)})
    summary = summarise(rows) | {"growth": growth}
    text = table(options, rows, growth, summary)
    print(text)
    if options["out"]:
        Path(options["out"]).write_text(f"{text}\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))


def random_checkpoint(options: dict, folder: Path) -> str:
    """A checkpoint of the model with initial weights."""
    import torch
    import yaml

    from dstrain.checkpoint.hf_import import run_config
    from dstrain.checkpoint.store import CheckpointStore
    from dstrain.config.compose import compose
    from dstrain.model.init import initial_value
    from dstrain.model.model import Model

    depth = max(map(int, options["drafts"].split(",")))
    keys = [f"model.num_nextn_predict_layers={depth}", "model.mtp_depth_weights=null"] if depth else []
    config = compose("train", [f"model={options['model']}", *keys])[0].model
    with torch.device("meta"):
        shapes = Model(config, torch.float32).state_dict()
    bias = "e_score_correction_bias"
    tensors = {
        name: torch.zeros(x.shape) if name.endswith(bias) else initial_value(name, x.shape, config, 0, torch.float32)
        for name, x in shapes.items()
    }
    store = CheckpointStore(folder / "checkpoint", keep=2)
    store.save(1, tensors, {"format": 1}, {"config.yaml": yaml.safe_dump(run_config(config, folder)).encode()})
    if (error := store.wait()) is not None:
        raise error
    return str(store.newest())


def prompts_of(options: dict, checkpoint: str, count: int) -> list[list[int]]:
    """`count` prompts of `prompt` tokens each."""
    import torch

    from dstrain.checkpoint.find import find_checkpoint
    from dstrain.checkpoint.store import CheckpointStore
    from dstrain.config.run_files import load_train_config
    from dstrain.data.corpus import open_corpus
    from dstrain.data.indexed import IndexedDataset

    path = find_checkpoint(checkpoint, lambda line: print(line, file=sys.stderr), verified=False)
    config = load_train_config(CheckpointStore.file(path, "config.yaml").decode())
    length = int(options["prompt"])
    if not options["checkpoint"]:
        draw = torch.Generator().manual_seed(0)
        return torch.randint(0, config.model.vocab_size, (count, length), generator=draw).tolist()
    documents = IndexedDataset(options["heldout"] or open_corpus(config.data).heldout)
    places = [max(int(tokens) - length + 1, 0) for tokens in documents.document_lengths]  # where a prompt may begin
    ends = list(itertools.accumulate(places))
    if ends[-1] < count:
        sys.exit(f"{documents.prefix}: {ends[-1]} places for a prompt of {length} tokens; {count} are needed")
    chosen = [i * ends[-1] // count for i in range(count)]
    numbers = [bisect.bisect_right(ends, place) for place in chosen]
    return [documents.read(n, place - ends[n] + places[n], length).tolist() for n, place in zip(numbers, chosen)]


def compare(options: dict, checkpoint: str, folder: Path, precision: str, batch: int) -> list[dict]:
    """Interleaved medians of every contestant at one precision and batch size."""
    rounds = int(options["rounds"])
    prompts = prompts_of(options, checkpoint, int(options["prompts"] or rounds * batch))
    share = [prompts[i * len(prompts) // rounds : (i + 1) * len(prompts) // rounds] for i in range(rounds)]
    specs = [{"who": "dstrain", "drafts": int(drafts)} for drafts in options["drafts"].split(",")]
    specs += [{"who": peer} for peer in options["peers"].split(",") if peer != "none"]
    contestants = [Contestant(spec, options, checkpoint, folder, precision, batch, prompts[:batch]) for spec in specs]
    for number, some in enumerate(share):
        for contestant in contestants:
            contestant.turn(some)
        print(f"{precision} batch {batch} round {number + 1}: "
              + "  ".join(f"{c.name} {c.turns[-1]['rate']:.1f} tokens/s" for c in contestants), file=sys.stderr)
    rows = [contestant.finish() for contestant in contestants]
    for row in rows:
        row["same_text"] = sum(a == b for a, b in zip(row["texts"], rows[0]["texts"])) / len(prompts)
    for row in rows:
        del row["texts"]
    return rows


class Contestant:
    """A process that continues prompts whenever it is asked."""

    def __init__(self, spec: dict, options: dict, *rest):
        self.name = spec["who"] + (f" drafts {spec['drafts']}" if spec.get("drafts") else "")
        self.precision, self.batch = rest[2], rest[3]
        self.timeout, self.turns, self.texts = float(options["timeout"]), [], []
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, spec, options, *rest), daemon=True)
        self.process.start()
        self.setting = self.receive()  # one after the other: each chooses its setting alone

    def receive(self):
        if not self.pipe.poll(self.timeout):
            sys.exit(f"{self.name} {self.precision}: no answer within {self.timeout:.0f} s")
        return self.pipe.recv()

    def turn(self, prompts: list[list[int]]) -> None:
        self.pipe.send(prompts)
        answer = self.receive()
        self.texts += answer.pop("texts")
        self.turns.append(answer | {"rate": answer["tokens"] / answer["seconds"]})

    def finish(self) -> dict:
        self.pipe.send(None)
        self.process.join(10)
        steps, accepted = (sum(turn[key] for turn in self.turns) for key in ("steps", "accepted"))
        rounds = {
            "prefill_tokens_per_second": [turn["prompt"] / turn["prefill"] for turn in self.turns],
            "tokens_per_second": [turn["rate"] for turn in self.turns],
            "step_seconds": [turn["seconds"] / turn["passes"] for turn in self.turns],
        }
        return {
            "who": self.name, "precision": self.precision, "batch": self.batch, "setting": self.setting,
            **{key: statistics.median(values) for key, values in rounds.items()},
            "accepted": accepted / steps, "rounds": rounds, "texts": self.texts,
        }


def work(pipe, spec, options, checkpoint, folder, precision, batch, warm_up) -> None:
    """The process of one contestant: says its setting, then answers prompts with texts and times until it gets None."""
    import torch
    from decode_contestants import fastest_peer, ours

    torch.set_num_threads(int(options["threads"]))
    new = int(options["new"])
    if spec["who"] == "dstrain":
        compiled = options["compile"] == "true"
        setting = f"compile {str(compiled).lower()}, drafts {spec['drafts']}"
        go_on = ours(checkpoint, precision, spec["drafts"], compiled)
    else:
        setting, go_on = fastest_peer(checkpoint, folder, precision, warm_up)
    go_on(warm_up, new)
    pipe.send(setting)
    while (prompts := pipe.recv()) is not None:
        total = {"prefill": 0.0, "seconds": 0.0, "steps": 0, "accepted": 0, "passes": 0, "texts": []}
        for first in range(0, len(prompts), batch):
            for key, value in go_on(prompts[first : first + batch], new).items():
                total[key] += value
        # The first token of each text comes with the prompt.
        total["tokens"] = sum(len(text) - 1 for text in total["texts"])
        pipe.send(total | {"prompt": sum(map(len, prompts))})


def by_context(options: dict, checkpoint: str, precision: str) -> list[dict]:
    """Time per token of one sequence by what its cache holds; the median of 32 tokens behind each length."""
    import torch

    from dstrain.inference.decoder import Decoder
    from dstrain.inference.load import load_weights
    from dstrain.parallel.dispatch import LocalDispatcher

    torch.set_num_threads(int(options["threads"]))
    model, _, _ = load_weights(checkpoint, precision, torch.device("cpu"), print, compiled=options["compile"] == "true")
    contexts, steps = sorted(map(int, options["contexts"].split(","))), 32
    decoder = Decoder(model, LocalDispatcher(), 1, contexts[-1] + steps)
    tokens = torch.randint(0, model.config.vocab_size, (1, decoder.stack.capacity))
    per_token = sum(cache.entries.shape[-1] * cache.entries.itemsize for cache in decoder.stack.caches)
    rows = []
    for context in contexts:
        decoder.advance(tokens[:, int(decoder.lengths) : context])
        seconds = []
        for place in range(context, context + steps):
            begin = time.perf_counter()
            decoder.advance(tokens[:, place : place + 1])
            seconds.append(time.perf_counter() - begin)
        decoder.lengths -= steps  # the next context begins behind this one's
        rows.append({"context": context, "cache_bytes": per_token * context, "seconds": statistics.median(seconds)})
        print(f"{precision} context {context}: {rows[-1]['seconds'] * 1e3:.2f} ms a token", file=sys.stderr)
    return rows


def table(options: dict, rows: list[dict], growth: list[dict], summary: dict) -> str:
    what = options["checkpoint"] and f"checkpoint {Path(options['checkpoint']).name}" or f"model {options['model']}"
    lines = [
        f"{what}, {options['prompt']} + {options['new']} tokens, {options['threads']} threads; {cpu_name()}, torch "
        f"{version('torch')}, transformers {version('transformers')}, {date.today()}; medians of {options['rounds']} rounds",
        "",
        "| precision | batch | who | setting | prompt tokens/s | ms per step | accepted per step | tokens/s | same text |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['precision']} | {row['batch']} | {row['who']} | {row['setting']} "
            f"| {row['prefill_tokens_per_second']:,.0f} | {row['step_seconds'] * 1e3:.2f} | {row['accepted']:.2f} "
            f"| {row['tokens_per_second']:,.1f} | {row['same_text']:.0%} |"
        )
    for name, drafts in summary.items():
        if name.startswith("dstrain_drafts"):
            lines += ["", f"{name}: acceptance a = {drafts['accepted']:.2f}, a step costs c = {drafts['cost']:.2f} plain "
                      f"ones; {drafts['measured']:.2f} times the tokens per second, (1 + a) / c = {drafts['expected']:.2f}"]
    for part in growth:
        lines += ["", f"| {part['precision']}: context | cache MB | ms per token |", "|---|---|---|"]
        lines += [f"| {r['context']} | {r['cache_bytes'] / 1e6:.2f} | {r['seconds'] * 1e3:.2f} |" for r in part["rows"]]
    return "\n".join(lines)


def summarise(rows: list[dict]) -> dict:
    """Tokens per second over transformers', and what drafts bring beside what is to be expected of them."""
    summary = {"rows": rows}
    for key in dict.fromkeys((row["precision"], row["batch"]) for row in rows):
        of = [row for row in rows if (row["precision"], row["batch"]) == key]
        plain, name = of[0], f"{key[0]}_batch{key[1]}"
        for row in of:
            if row["who"] == "transformers":
                summary[f"ratio_{name}"] = ratio(plain, row, "tokens_per_second")
                summary[f"prefill_ratio_{name}"] = ratio(plain, row, "prefill_tokens_per_second")
            elif row is not plain:
                cost = ratio(row, plain, "step_seconds")
                summary[f"{row['who'].replace(' ', '_')}_{name}"] = {
                    "accepted": row["accepted"], "cost": cost, "expected": (1 + row["accepted"]) / cost,
                    "measured": ratio(row, plain, "tokens_per_second"), "same_text": row["same_text"],
                }
    return summary


def ratio(one: dict, other: dict, key: str) -> float:
    """The median over the rounds, in each of which both continued the same prompts."""
    return statistics.median(a / b for a, b in zip(one["rounds"][key], other["rounds"][key]))


if __name__ == "__main__":
    main()
