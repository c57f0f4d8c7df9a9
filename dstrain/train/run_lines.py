"""What a run says of itself: its first and last lines, and what a dashboard keeps beside the configuration."""

import platform
from pathlib import Path

import torch

from dstrain.data.corpus import Corpus
from dstrain.model.count import Counts
from dstrain.parallel.layout import Layout
from dstrain.telemetry.console import RunConsole
from dstrain.train.preflight import code_digest
from dstrain.train.run_folder import RunFolder
from dstrain.train.state import RunState


def about_the_run(counts: Counts, layout: Layout) -> dict:
    """What a record in W&B has beside the configuration."""
    mesh = layout.mesh
    return {
        "code": {"digest": code_digest(), "python": platform.python_version(), "torch": torch.__version__},
        "layout": {
            "ranks": mesh.world_size, "pp": mesh.pp, "ep": mesh.ep, "edp": mesh.edp, "dp": mesh.dp, "lines": layout.lines(),
        },
        "parameters": {"main": counts.main, "total": counts.total, "activated": counts.activated},
    }


def report_resume(console: RunConsole, checkpoint: Path, state: RunState, changed: list[str]) -> None:
    console.say(f"continuing from {checkpoint}: step {state.step}, {state.tokens:,} tokens")
    for line in changed:
        console.say(f"  changed since then: {line}")


def report_start(console, config, counts, precision, device, corpus, folder, layout) -> None:
    has = "" if precision.name == "bf16" else "no "
    fp8 = f", backend {precision.fp8.name}, scales {config.precision.scales}" if precision.fp8 is not None else ""
    asked = f" (auto: {device.type} has {has}BF16 instructions)" if config.precision.name == "auto" else ""
    depth = config.model.num_nextn_predict_layers
    mtp = f", MTP depth {depth} adds {counts.total - counts.main:,}" if depth else ""
    end = f"{config.schedule.tokens:,.0f} tokens" if config.run.steps is None else f"step {config.run.steps}"
    console.say(
        f"model {config.model.name}: {counts.main:,} parameters, {counts.activated:,} activated per token{mtp}\n"
        f"precision {precision.name}{asked}{fp8}, device {device.type}, {torch.get_num_threads()} threads\n"
        f"data {corpus.name}: {corpus.train_tokens:,} training tokens, {corpus.heldout_tokens:,} held out\n"
        f"batch {config.batch.sequences} x {config.data.sequence_length} tokens "
        f"in micro-batches of {config.batch.micro_sequences}\n"
        f"run until {end}, in {folder.path}"
    )
    for line in layout.lines():
        console.say(line)


def report_end(
    console: RunConsole, word: str, folder: RunFolder, state: RunState, final: dict | None, corpus: Corpus
) -> None:
    if final is not None and corpus.gzip_bits_per_byte is not None:
        console.say(
            f"held-out text: {final['bits_per_byte']:.3f} bits per byte "
            f"(gzip -9 {corpus.gzip_bits_per_byte:.3f}, xz -9 {corpus.xz_bits_per_byte:.3f} on the same files)"
        )
    console.say(
        f"{word}: {state.step} steps, {state.tokens:,} tokens, {state.skipped} skipped; everything is in {folder.path}"
    )
