"""`dstrain train`: builds everything a run needs, continues it from its newest checkpoint, and runs it."""

import os
import shutil
import sys
from pathlib import Path

import torch
import yaml

from dstrain.checkpoint.find import find_checkpoint
from dstrain.checkpoint.store import CheckpointStore
from dstrain.config.build import build
from dstrain.config.errors import InputError
from dstrain.config.run_files import differences, save_run_config
from dstrain.config.schema import ModelConfig, TrainConfig
from dstrain.data.corpus import Corpus, build_corpus
from dstrain.model.count import count_parameters
from dstrain.parallel.device import pick_device
from dstrain.parallel.group import CommunicationError
from dstrain.parallel.layout import Layout
from dstrain.parallel.world import World
from dstrain.precision.pointwise import compile_kernels
from dstrain.precision.policy import Precision, resolve_precision
from dstrain.telemetry.console import RunConsole
from dstrain.telemetry.peak import peak_tflops
from dstrain.telemetry.report import report_of_run
from dstrain.telemetry.wandb_run import start_wandb
from dstrain.train.ema import Ema
from dstrain.train.initial import carried_files, own_checkpoint, start_from, with_tokenizer
from dstrain.train.job import Job, RunFailure
from dstrain.train.needs import check_memory, checkpoint_bytes
from dstrain.train.preflight import agree, disk_lines, preflight
from dstrain.train.run_data import open_data
from dstrain.train.run_folder import FollowedFolder, RunFolder
from dstrain.train.run_lines import about_the_run, report_end, report_resume, report_start
from dstrain.train.state import RunState, architecture, build_state, initialise, restore
from dstrain.train.step import Stepper
from dstrain.train.trainer import Trainer


def train(config: TrainConfig, plain: dict, overrides: list[str], world: World | None = None) -> int:
    """Run or continue the run that `config` describes, as one rank of `world`. -> the exit code."""
    world = world or World.start()
    job = Job(world)
    try:
        return _train(config, plain, overrides, world, job)
    except RunFailure as failure:
        if world.is_first:
            print(f"dstrain: {failure}", file=sys.stderr)
        return 1
    except CommunicationError:
        if not job.verdict():
            raise
        sys.stdout.flush()
        os._exit(1)  # at an interpreter's end gloo would wait for ranks that are gone
    except BaseException:
        job.verdict()
        raise
    finally:
        job.close()


def _train(config: TrainConfig, plain: dict, overrides: list[str], world: World, job: Job) -> int:
    console = RunConsole(config.telemetry.log_every, quiet=not world.is_first)
    device, precision, layout, (need, _) = world.all(lambda: place(config, world))
    counts = count_parameters(config.model)
    source = world.first(lambda: initial_checkpoint(config, console))
    data = (with_tokenizer(config, source) if source else config).data
    world.first(lambda: build_corpus(data))
    corpus, tokenizer, stream, windows = world.all(lambda: open_data(config, data))
    agree(world, {"the data": (corpus.fingerprint,)})

    path = Path(config.run.dir) / config.run.name
    folder = world.all(lambda: RunFolder(path) if world.is_first else FollowedFolder(path))
    world.all(lambda: job.open_log(folder.path, console))
    layout.connect(device)
    hosts = preflight(world, layout, device, need, console.say)
    store = CheckpointStore(
        folder.path / "checkpoints", config.checkpoint.keep, lambda step, line: console.say(f"WARNING: {line}"),
        ranks=layout.mesh.host_group,
    )
    each = checkpoint_bytes(config, counts, precision)
    world.first(lambda: store.check_space(each))
    for line in world.first(lambda: disk_lines(store.root, each, config.checkpoint.keep)[1]):
        console.say(f"WARNING: {line}")
    report_start(console, config, counts, precision, device, corpus, folder, layout)

    torch.manual_seed(config.run.seed + layout.mesh.data_rank)
    model, optimizer = build_state(config, precision, device, layout.replicas)
    ema = None if config.ema.decay is None else Ema(model, optimizer, config.ema)
    state, lines = RunState(), []
    checkpoint = store.open_newest(console.say)
    if checkpoint is None and (folder.path / "metrics.jsonl").exists():
        console.say(f"WARNING: {store.root} holds no checkpoint, this run starts from the beginning")
    if checkpoint is None and source is None:
        initialise(model, optimizer, config.run.seed)
    elif checkpoint is None:
        console.say(f"starting from the weights of checkpoint.initial: {source}, model {config.model.name}")
        for line in start_from(model, optimizer, source, config.run.seed):
            console.say(f"  {line}")
    else:
        stored, meta = world.all(lambda: check_resumable(checkpoint, config, corpus))
        lines = restore(model, optimizer, checkpoint, ema)
        state = RunState(**meta["state"])
        report_resume(console, checkpoint, state, differences(stored, plain))
    if ema is not None:
        if checkpoint is None:
            ema.start()
        lines.append(f"average of the weights: {ema.nbytes / 2**20:,.1f} MiB of host memory on rank 0")
    for line in lines:
        console.say(line)
    if world.is_first:
        save_run_config(folder.path, plain, overrides)
        attached = plain | about_the_run(counts, layout)
        job.wandb = start_wandb(config.telemetry, folder.path, config.model, config.run.name, attached, console.say)
    folder.clear_status()

    stepper = Stepper(config, model, optimizer, layout.dispatcher(device, precision.compute), stream, layout, ema)
    peak, origin = config.telemetry.peak_tflops, "telemetry.peak_tflops"
    if peak is None:
        peak, origin = world.first(lambda: peak_tflops(device, precision.compute))
    console.say(f"mfu is measured against {peak:.3g} TFLOPS a rank ({origin})")
    files = {
        "config.yaml": yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).encode(),
        "tokenizer.json": Path(corpus.tokenizer).read_bytes(),
        **(carried_files(config, source) if source else {}),
    }
    trainer = Trainer(
        config, folder, console, model, optimizer, stepper, state, layout, store, windows, tokenizer.token_bytes(), files,
        corpus.fingerprint, peak * world.size, job.obey_signals(), job.failed, job.wandb,
    )
    if trainer.finished():
        console.say(f"nothing to do: the run has {state.step} steps and {state.tokens:,} tokens already")

    def on_verdict(line: str) -> None:
        folder.write_status("failed", step=state.step, tokens=state.tokens, reason=line)
        trainer.leave_save()

    job.start_watch(layout.mesh.host_group, hosts, config.parallel.timeout, on_verdict)
    try:
        final = trainer.run()
        report_end(console, "so far" if trainer.signals.received else "done", folder, state, final, corpus)
        job.end(layout.mesh.host_group)
    finally:
        if world.is_first:  # when no rank waits for it any more
            report_of_run(folder.path, console)
    world.end()
    job.wandb.finish()  # nobody waits for this rank any more
    folder.release()
    return 0


def place(config: TrainConfig, world: World) -> tuple[torch.device, Precision, Layout, tuple[float, float]]:
    """What this rank runs on and in, its place among the others, and the bytes that it needs and has.

    Raises InputError where that cannot be.
    """
    device = world.device(pick_device(config.run.device))
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.compile:
        check_compiler(device)
        compile_kernels()
    precision = resolve_precision(config.precision.name, device, config.precision.backend, config.precision.scales)
    layout = Layout(config, world.size, world.rank, world.local_size)
    return device, precision, layout, check_memory(config, layout, precision, device, world)


def initial_checkpoint(config: TrainConfig, console: RunConsole) -> Path | None:
    """Whose architecture and tokenizer the run takes: its own newest checkpoint's, else checkpoint.initial's."""
    where = config.checkpoint.initial
    if where is None:
        return None
    own = own_checkpoint(config.run.dir, config.run.name)
    if own is None:
        return find_checkpoint(where, console.say, "checkpoint.initial")
    console.say(f"IGNORED checkpoint.initial={where}: the run has checkpoints of its own and continues from them")
    return own


def check_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", os.environ.get("CXX", "g++"))):
        raise InputError(
            "run.compile=true: torch.compile needs a C++ compiler on the CPU (g++ or clang++); valid: run.compile=false"
        )


def check_resumable(checkpoint: Path, config: TrainConfig, corpus: Corpus) -> tuple[dict, dict]:
    """The configuration and the meta of `checkpoint`; InputError unless it belongs to this model and this data."""
    stored = yaml.safe_load(CheckpointStore.file(checkpoint, "config.yaml"))
    meta = CheckpointStore.meta(checkpoint)
    theirs, ours = architecture(build(ModelConfig, stored["model"], "model")), architecture(config.model)
    if theirs != ours:
        lines = ", ".join(f"model.{line}" for line in differences(theirs, ours))
        raise InputError(f"{checkpoint} is of another model ({lines}); choose another run.name")
    if meta["data"] != corpus.fingerprint:
        raise InputError(
            f"{checkpoint} was trained on other data than {corpus.train} (another text, tokenizer or vocabulary); "
            "restore the data or choose another run.name"
        )
    return stored, meta
