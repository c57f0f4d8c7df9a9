"""Data beside the step: start-up on a very large set, the loader's share of a step, and `dstrain prepare`.

    python tools/bench_data.py                                      # all three
    python tools/bench_data.py parts=start documents=1e7 tokens=1e10 rounds=5
    python tools/bench_data.py parts=prepare megabytes=64 threads=2 out=tools/results/data_cpu.md

start    From "imports are done" to the first batch, as `dstrain train` gets there: token files and tokenizer opened and
         checked, the first order drawn. The set's documents have geometrically distributed lengths; its tokens are a
         hole in a sparse file. Memory: the process's peak above what it had after the imports and above the mapped
         index.
         `one` source, the same with `fim` and a `mixture` of five (each with its own index).
loader   What of a step is the loader's: the samples of its batch, checked, as micro-batches with masks, beside a whole
         training step of `model`, in one process, by turns; from the same set.
prepare  Source code as JSON lines into token files by `dstrain prepare` beside the tokenizers library's own
         `encode_batch` in one process with the same processors: reading and parsing the same file, and ids as lists.
         A second size, a tenth, gives the share that is start-up; rates are of the difference.

Every measurement is a process of its own, by turns over `rounds`; medians. clock=cpu: processor time of a process and
its children, for a machine that others use too. The last line is JSON.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from bench_scale import memory
from bench_step import ALLOCATOR, cpu_name

DEFAULTS = {
    "parts": "start,loader,prepare", "documents": "1e7", "tokens": "1e10", "sequence": "512", "batch": "4",
    "model": "bench_81m", "precision": "bf16", "megabytes": "64", "vocab_size": "4096", "threads": "2", "rounds": "5",
    "clock": "wall", "folder": "", "timeout": "900", "out": "",
}
MIXTURE = 5  # sources
FIRST = 100  # samples, among which every source has some


def main() -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}")
    parts, summary, text = options["parts"].split(","), {}, [heading(options)]
    os.environ |= {"OMP_NUM_THREADS": options["threads"], "TOKENIZERS_PARALLELISM": "true"}
    with tempfile.TemporaryDirectory(dir=options["folder"] or None, prefix="bench-data-") as name:
        folder = Path(name)
        if "start" in parts or "loader" in parts:
            say(f"writing the index of {float(options['documents']):,.0f} documents")
            make_set(folder, int(float(options["documents"])), int(float(options["tokens"])))
        for part, run, write in (("start", start, start_table), ("loader", loader, loader_table),
                                 ("prepare", prepare, prepare_table)):
            if part in parts:
                summary[part] = run(options, folder)
                text += ["", write(options, summary[part])]
    print("\n".join(text))
    if options["out"]:
        Path(options["out"]).write_text("\n".join(text) + f"\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))


def heading(options: dict) -> str:
    return (f"{options['threads']} threads, clock={options['clock']}; {cpu_name()}, torch {version('torch')}, "
            f"tokenizers {version('tokenizers')}, {date.today()}; medians of {options['rounds']} rounds")


def say(text: str) -> None:
    print(text, file=sys.stderr)


def make_set(folder: Path, documents: int, tokens: int) -> None:
    """set.bin, a hole, and set.idx, with a tokenizer that has marks."""
    import numpy as np

    from dstrain.data.indexed import HEADER, INT32_CODE, MAGIC, VERSION
    from dstrain.data.tokenizer import Tokenizer

    lengths = np.random.default_rng(0).geometric(documents / tokens, documents).astype("<i4")
    with open(folder / "set.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, INT32_CODE, documents, documents + 1))
        file.write(lengths.tobytes())
        file.write((4 * (lengths.cumsum(dtype="<i8") - lengths)).tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())
    with open(folder / "set.bin", "wb") as file:
        file.truncate(4 * int(lengths.sum(dtype=np.int64)))
    for number in range(MIXTURE):
        for end in ("bin", "idx"):
            os.link(folder / f"set.{end}", folder / f"set{number}.{end}")
    Tokenizer.train(["some text"], 264).save(folder / "tokenizer.json")


def overrides(kind: str, options: dict, folder: Path) -> list[str]:
    """Of `dstrain train`, for a stream of one kind: one, mask, fim, mixture."""
    sources = ",".join(
        f"{{name: s{n}, task: code, share: {1 + n}, train: {folder / f'set{n}'}}}" for n in range(MIXTURE)
    )
    given = f"data.sources=[{sources}]" if kind == "mixture" else f"data.train={folder / 'set'}"
    return [
        f"model={options['model']}", f"precision={options['precision']}",
        "data=mixture" if kind == "mixture" else "data=files", given,
        f"data.tokenizer={folder / 'tokenizer.json'}", f"data.sequence_length={options['sequence']}",
        f"batch.sequences={options['batch']}", f"batch.micro_sequences={options['batch']}",
        f"data.fim_rate={0.1 if kind == 'fim' else 0}", f"data.document_mask={'true' if kind == 'mask' else 'false'}",
    ]


def apart(function, options: dict, *arguments) -> dict:
    """What function(pipe, options, *arguments) sends, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=function, args=(other, options, *arguments), daemon=True)
    process.start()
    other.close()
    try:
        if not pipe.poll(float(options["timeout"])):
            sys.exit(f"{function.__name__}: no answer within {options['timeout']} s")
        return pipe.recv()
    except EOFError:
        sys.exit(f"{function.__name__}: its process ended without an answer")
    finally:
        process.kill()
        process.join()


def clock_of(options: dict):
    return {"wall": time.perf_counter, "cpu": time.process_time}[options["clock"]]


# Start ---------------------------------------------------------------------------------------------------------------


def start(options: dict, folder: Path) -> dict:
    kinds = ("one", "fim", "mixture")
    results: dict[str, list[dict]] = {kind: [] for kind in kinds}
    for number in range(int(options["rounds"])):
        for kind in kinds:
            results[kind].append(apart(start_once, options, overrides(kind, options, folder)))
            say(f"start {kind}, round {number + 1}: {results[kind][-1]['seconds']:.2f} s, "
                f"{results[kind][-1]['peak_mb']:.0f} MB")
    return {kind: {key: statistics.median(r[key] for r in results[kind]) for key in results[kind][0]} for kind in kinds}


def start_once(pipe, options: dict, keys: list[str]) -> None:
    from dstrain.config.compose import compose
    from dstrain.train.run_data import open_data

    config = compose("train", keys)[0]
    index = sum(os.path.getsize(f"{prefix}.idx") for prefix in prefixes_of(config))
    before, clock = memory("VmRSS"), clock_of(options)
    begin = clock()
    _, _, stream, _ = open_data(config, config.data)
    stream.batch(0, config.batch.sequences)
    seconds = clock() - begin
    # The index, of which every page was mapped, is no more than its file.
    pipe.send({"seconds": seconds, "peak_mb": (memory("VmHWM") - before - index) / 1e6,
               "held_mb": (memory("VmRSS") - before - index) / 1e6, "index_mb": index / 1e6})


def prefixes_of(config) -> list[str]:
    return [config.data.train] if config.data.sources is None else [source.train for source in config.data.sources]


def start_table(options: dict, results: dict) -> str:
    lines = [
        f"Start: {float(options['tokens']):,.0f} tokens in {float(options['documents']):,.0f} documents (a source "
        "of the mixture too)", "",
        "| data | s to the first batch | peak above imports and index, MB | kept, MB | index, MB |",
        "|---|---|---|---|---|",
    ]
    for kind, r in results.items():
        lines.append(f"| {kind} | {r['seconds']:.2f} | {r['peak_mb']:.0f} | {r['held_mb']:.0f} | {r['index_mb']:.0f} |")
    return "\n".join(lines)


# Loader --------------------------------------------------------------------------------------------------------------


def loader(options: dict, folder: Path) -> dict:
    kinds = ("one", "mask", "fim", "mixture")
    os.environ |= ALLOCATOR
    return apart(load, options, {kind: overrides(kind, options, folder) for kind in kinds})


def load(pipe, options: dict, keys: dict[str, list[str]]) -> None:
    """One step of the model, and the batch of one step of every kind of data, by turns."""
    import torch
    import bench_step

    from dstrain.config.compose import compose
    from dstrain.model.batch import MicroBatch
    from dstrain.train.run_data import open_data

    torch.set_num_threads(int(options["threads"]))
    configs = {kind: compose("train", of_kind)[0] for kind, of_kind in keys.items()}
    streams = {kind: open_data(config, config.data)[2] for kind, config in configs.items()}
    config = configs["one"]
    depth, sequences, clock = config.model.num_nextn_predict_layers, config.batch.sequences, clock_of(options)
    tokens = torch.randint(0, config.model.vocab_size, (sequences, config.data.sequence_length + 1 + depth))
    _, step = bench_step.ours(config, tokens, options["precision"], False)

    def batch(kind: str, first: int) -> None:
        micro = MicroBatch(*streams[kind].batch(first, sequences), depth, configs[kind].data.document_mask)
        micro.valid_counts(), micro.starts, micro.positions

    seconds: dict[str, list[float]] = {"step": [], **{kind: [] for kind in keys}}
    for kind in keys:
        streams[kind].batch(0, FIRST)  # draws the orders: that is the start
    for number in range(int(options["rounds"])):
        begin = clock()
        step()
        seconds["step"].append(clock() - begin)
        for kind in keys:
            begin = clock()
            batch(kind, FIRST + number * sequences)
            seconds[kind].append(clock() - begin)
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    pipe.send({"seconds": median, "share": {kind: median[kind] / median["step"] for kind in keys}})


def loader_table(options: dict, results: dict) -> str:
    lines = [
        f"Loader: {options['batch']} samples of {options['sequence']} tokens, beside a step of {options['model']} "
        f"({options['precision']}, {results['seconds']['step']:.2f} s)", "", "| data | ms a step | share of the step |",
        "|---|---|---|",
    ]
    for kind, share in results["share"].items():
        lines.append(f"| {kind} | {1e3 * results['seconds'][kind]:.2f} | {share:.3%} |")
    return "\n".join(lines)


# Prepare -------------------------------------------------------------------------------------------------------------


def prepare(options: dict, folder: Path) -> dict:
    from dstrain.data.tokenizer import Tokenizer

    texts = library_texts()
    tokenizer = folder / "code.json"
    say(f"training a tokenizer of {options['vocab_size']} tokens")
    Tokenizer.train(texts[:300], int(options["vocab_size"])).save(tokenizer)
    megabytes = float(options["megabytes"])
    sizes = {f"{name}.jsonl": write_lines(folder / f"{name}.jsonl", texts, 1e6 * size)
             for name, size in (("large", megabytes), ("little", megabytes / 10))}
    who = {"prepare": ours, "encode_batch": theirs, "encode_batch_fast": theirs}
    seconds: dict[tuple[str, str], list[float]] = {(name, size): [] for name in who for size in sizes}
    for number in range(int(options["rounds"])):
        for (name, size), values in seconds.items():
            values.append(who[name](name, folder / size, tokenizer, options))
            say(f"{name} {size}, round {number + 1}: {values[-1]:.1f} s")
    (large, large_bytes), (little, little_bytes) = sizes.items()
    results: dict = {"megabytes": large_bytes / 1e6}
    for name in who:
        whole, part = (statistics.median(seconds[name, size]) for size in (large, little))
        rate = (large_bytes - little_bytes) / (whole - part) / 1e6
        results[name] = {"seconds": whole, "start_up": whole - large_bytes / 1e6 / rate, "mb_per_second": rate}
    for name in ("encode_batch", "encode_batch_fast"):
        results[f"times_of_{name}"] = results[name]["mb_per_second"] / results["prepare"]["mb_per_second"]
    return results


def library_texts() -> list[str]:
    """Sources of Python's standard library."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                texts.append(path.read_text("utf-8"))
            except UnicodeDecodeError:
                continue
    return [text for text in texts if text.strip()]


def write_lines(path: Path, texts: list[str], size: float) -> int:
    """Texts as JSON lines until they hold `size` bytes, again from the first where they are too few. -> their bytes."""
    done = 0
    with open(path, "w") as file:
        while done < size:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                done += len(text.encode())
                if done >= size:
                    break
    return done


ENCODE = """
import json, sys, tokenizers
name, source, tokenizer = sys.argv[1:]
library = tokenizers.Tokenizer.from_file(tokenizer)
with open(source, "rb") as file:
    texts = [json.loads(line)["text"] for line in file]
tokens = sum(len(encoding.ids) for encoding in getattr(library, name)(texts, add_special_tokens=False))
print(tokens)
"""


def theirs(name: str, source: Path, tokenizer: Path, options: dict) -> float:
    return timed([sys.executable, "-c", ENCODE, name, str(source), str(tokenizer)], options)


def ours(name: str, source: Path, tokenizer: Path, options: dict) -> float:
    out = source.parent / "out"
    for path in source.parent.glob("out.*"):
        path.unlink()
    return timed([sys.executable, "-m", "dstrain", "prepare", f"from={source}", f"out={out}", f"tokenizer={tokenizer}",
                  f"workers={options['threads']}"], options)


def timed(command: list[str], options: dict) -> float:
    """Seconds of a command: by the clock, or of its processors."""
    begin, used = time.perf_counter(), children_seconds()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": options["threads"]}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=float(options["timeout"]))
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} failed: {done.stderr[-500:]}")
    return time.perf_counter() - begin if options["clock"] == "wall" else children_seconds() - used


def children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def prepare_table(options: dict, results: dict) -> str:
    lines = [
        f"Prepare: {results['megabytes']:.0f} MB of source code as JSON lines, {options['threads']} processes or "
        f"threads, vocabulary {options['vocab_size']}", "", "| who | s | of it start-up | MB/s | time of ours |",
        "|---|---|---|---|---|",
    ]
    for name in ("prepare", "encode_batch", "encode_batch_fast"):
        r, times = results[name], results.get(f"times_of_{name}")
        lines.append(f"| {name} | {r['seconds']:.1f} | {r['start_up']:.1f} | {r['mb_per_second']:.2f} "
                     f"| {'' if times is None else f'{times:.2f} times'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
