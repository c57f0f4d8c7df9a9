"""`dstrain evaluate`: loss, accuracy, bits per byte and expert load of a checkpoint on any text.

What the trainer's own evaluation computes, by the same code, in one process: micro-batches of the run's size, its
precision, its document mask. The result is on standard output, everything else on standard error.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dstrain.checkpoint.find import find_checkpoint
from dstrain.checkpoint.hf_tokenizer import TOKENIZER
from dstrain.checkpoint.store import FILES, CheckpointStore
from dstrain.checkpoint.weights import load_weights_of
from dstrain.config.errors import InputError
from dstrain.config.run_files import load_train_config
from dstrain.config.schema import EvaluateConfig, ParallelConfig, PrecisionConfig, TrainConfig
from dstrain.config.validate import validate
from dstrain.data.corpus import cached_corpus, check_vocabulary, open_corpus
from dstrain.data.indexed import IndexedDataset, IndexedWriter
from dstrain.data.samples import EvalWindows
from dstrain.data.shards import file_hash
from dstrain.data.sources import text_problem
from dstrain.data.tokenizer import Tokenizer
from dstrain.model.model import Model
from dstrain.parallel.device import pick_device
from dstrain.parallel.layout import Layout
from dstrain.precision.policy import resolve_precision
from dstrain.train.bias import max_violation
from dstrain.train.evaluation import ExpertLoads, evaluate_heldout
from dstrain.train.initial import with_tokenizer
from dstrain.train.run_data import Checked

REPORT_SECONDS = 10.0  # between lines of progress where there is no terminal
SLOW_TEXT = 2_000_000  # bytes whose encoding is announced


def evaluate(config: EvaluateConfig) -> int:
    """Print the evaluation. -> the exit code."""
    path = find_checkpoint(config.checkpoint, _report)
    run = of_one_process(load_train_config(CheckpointStore.file(path, "config.yaml").decode()), config)
    files = CheckpointStore.files(path)
    tokenizer = Tokenizer(files[TOKENIZER].decode(), f"{path}: {TOKENIZER}") if TOKENIZER in files else None
    with TemporaryDirectory() as scratch:
        data, windows = open_windows(config, run, path, tokenizer, Path(scratch))
        device = pick_device(config.device, "device")
        precision = resolve_precision(run.precision.name, device, run.precision.backend, run.precision.scales)
        with device:
            model = Model(run.model, precision.compute, fp8=precision.fp8).requires_grad_(False)
        load_weights_of(path, model.state_dict(), config.weights)
        layout, loads = Layout(run), ExpertLoads(model)
        executor = layout.executor(model, layout.dispatcher(device, precision.compute), run.batch.sequences)
        token_bytes = np.zeros(run.model.vocab_size, np.int64) if tokenizer is None else tokenizer.token_bytes()
        begin = time.perf_counter()
        with progress(f"evaluation of {data}") as show:
            result = evaluate_heldout(
                run, executor, layout.mesh, windows, token_bytes, config.sequences, 0, show, loads
            )
    state = CheckpointStore.meta(path).get("state", {})
    counts = loads.counts.tolist()
    found = {
        "checkpoint": str(path),
        "step": state.get("step"),
        "tokens": state.get("tokens"),
        "weights": config.weights,
        "data": data,
        "precision": precision.name,
        "sequence_length": run.data.sequence_length,
        "sequences": min(config.sequences or len(windows), len(windows)),
        **result,
        "moe_layers": model.moe_layers,
        "moe_load": counts,
        "moe_max_violation": max_violation(counts),
        "seconds": time.perf_counter() - begin,
    }
    print(json.dumps(found) if config.output == "json" else "\n".join(table(found, run.model.num_hidden_layers)))
    return 0


def of_one_process(run: TrainConfig, config: EvaluateConfig) -> TrainConfig:
    """The run's configuration for one process, one micro-batch at a time, with what the command line changes."""
    batch = replace(run.batch, sequences=run.batch.micro_sequences, ramp=None)
    run = replace(run, batch=batch, parallel=ParallelConfig())
    if config.precision is not None and config.precision != run.precision.name:
        run = replace(run, precision=PrecisionConfig(config.precision))
    if config.sequence_length is not None:
        run = replace(run, data=replace(run.data, sequence_length=config.sequence_length))
        try:
            validate(run)
        except InputError as error:
            raise InputError(f"sequence_length={config.sequence_length}: {error}") from None
    return run


def open_windows(
    config: EvaluateConfig, run: TrainConfig, path: Path, tokenizer: Tokenizer | None, scratch: Path
) -> tuple[str, Checked]:
    """What is evaluated, in words, and its windows. scratch: a folder for the token files of a text.

    Raises InputError for data that is missing, empty, or of another vocabulary or tokenizer than the checkpoint's.
    """
    if config.data is None:
        name, prefix = "the held-out set of the run", own_heldout(run, path)
    elif Path(config.data).is_file():
        name, prefix = config.data, encoded(Path(config.data), tokenizer, path, scratch)
    else:
        name = prefix = config.data
        check_origin(prefix, path)
    dataset = IndexedDataset(prefix)
    vocab_size = run.model.vocab_size if tokenizer is None else min(tokenizer.vocab_size, run.model.vocab_size)
    check_vocabulary(dataset, vocab_size, f"checkpoint {path}")
    windows = EvalWindows(dataset, run.data.sequence_length, run.model.num_nextn_predict_layers)
    return name, Checked(windows, replace(run.model, vocab_size=vocab_size), prefix)


def own_heldout(run: TrainConfig, path: Path) -> str:
    """The prefix of the held-out token files that the run's own evaluations use."""
    trained_on = CheckpointStore.meta(path).get("data")
    if trained_on is None:
        raise InputError(f"{path} was imported and has no held-out set of its own; give data=…, token files or a text")
    if run.checkpoint.initial is not None:
        run = with_tokenizer(run, path)
    corpus = cached_corpus(run.data, trained_on) or open_corpus(run.data)
    if corpus.fingerprint != trained_on:
        raise InputError(
            f"the data of {path} is not what it was trained on any more (another text, tokenizer or vocabulary); "
            "restore it, or give data=…"
        )
    if corpus.heldout is None:
        raise InputError(f"{path} is of a run without a held-out set (data.heldout=null); give data=…")
    return corpus.heldout


def encoded(text: Path, tokenizer: Tokenizer | None, path: Path, scratch: Path) -> str:
    """The prefix of token files, made in `scratch`, that hold a text file as one document."""
    if text.suffix in (".bin", ".idx"):
        raise InputError(f"data={text}: token files are named by what comes before .bin and .idx")
    if tokenizer is None:
        raise InputError(f"data={text}: checkpoint {path} has no tokenizer to encode a text with; give token files")
    try:
        content = text.read_bytes()
    except OSError as error:
        raise InputError(f"data={text}: cannot read this text: {error.strerror}") from None
    problem = text_problem(content)
    if problem:
        raise InputError(f"data={text}: {problem}; UTF-8 text or the prefix of token files is needed")
    if len(content) >= SLOW_TEXT:
        _report(f"encoding {text}, {len(content) / 1e6:,.0f} MB (`dstrain prepare` makes token files to keep)")
    with IndexedWriter(scratch / "text") as writer:
        writer.add_document(tokenizer.encode_document(content.decode()))
    return str(scratch / "text")


def check_origin(prefix: str, path: Path) -> None:
    """InputError where `dstrain prepare` made these token files with another tokenizer than the checkpoint's."""
    summary, own = Path(prefix + ".json"), path / FILES / TOKENIZER
    if not summary.is_file() or not own.is_file():
        return
    try:
        made_with = json.loads(summary.read_text())["job"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError):  # of another program
        return
    if made_with != file_hash(str(own)):
        raise InputError(
            f"data={prefix}: by {summary} it was encoded with another tokenizer than that of checkpoint {path}; encode "
            f"it with {own}"
        )


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], bool]]:
    """Gives a function of (done, total) that always says to go on: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    begin = reported = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> bool:
            nonlocal reported
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if not console.is_terminal and now - reported >= REPORT_SECONDS:
                reported = now
                left = (now - begin) * (total - done) / done
                console.print(f"{what}: {done} of {total} sequences, {left:,.0f} s left", markup=False)
            return True

        yield show


def table(found: dict, main_layers: int) -> list[str]:
    """The evaluation in lines for people. main_layers: of the main model; layers behind them are MTP modules."""
    trained = "imported" if found["step"] is None else f"step {found['step']}, {found['tokens']:,} tokens"
    all_of = "all of them" if found["whole"] else "the first of them"
    bits = found["bits_per_byte"]
    rows = [("", "loss", "accuracy"), ("main", f"{found['loss']:.4f}", f"{found['accuracy']:.2%}")]
    for depth, scores in enumerate(zip(found["loss_mtp"], found["accuracy_mtp"]), 1):
        rows.append((f"mtp {depth}", f"{scores[0]:.4f}", f"{scores[1]:.2%}"))
    lines = [
        f"checkpoint  {found['checkpoint']}: {trained}; {found['weights']} weights in {found['precision']}",
        f"data        {found['data']}: {found['heldout_tokens']:,} predicted tokens in {found['sequences']:,} sequences "
        f"of {found['sequence_length']}, {all_of}; {found['seconds']:.1f} s",
        "",
        *(f"{name:<10}{loss:>10}{accuracy:>12}" for name, loss, accuracy in rows),
        "",
        "bits per byte  " + ("unknown" if bits is None else f"{bits:.4f} of {found['heldout_bytes']:,} bytes"),
    ]
    if not found["moe_load"]:
        return lines
    lines += ["", f"expert load, max violation {found['moe_max_violation']:.2f}"]
    lines += ["layer     max violation   busiest   idlest"]
    for layer, load in zip(found["moe_layers"], found["moe_load"]):
        name = f"mtp {layer - main_layers + 1}" if layer >= main_layers else str(layer)
        mean = max(sum(load) / len(load), 1e-9)
        lines.append(
            f"{name:<10}{max_violation([load]):>13.2f}{_expert(load, max):>10}{_expert(load, min):>9}"
            f"  ({min(load) / mean:.2f} of the mean)"
        )
    return lines


def _expert(load: list[int], which: Callable) -> str:
    return str(load.index(which(load)))


def _report(line: str) -> None:
    print(f"dstrain: {line}", file=sys.stderr)
