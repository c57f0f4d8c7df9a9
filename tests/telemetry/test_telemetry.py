"""Metric files and what the metrics say."""

import io
import json
import os
import re
import resource

import pytest
from helpers import make_config, metrics, run
from rich.console import Console

from dstrain.model.count import flops_per_token
from dstrain.telemetry.console import LastingOutput, RunConsole
from dstrain.telemetry.jsonl import JsonLines
from dstrain.train.bias import max_violation

CONTRACT = (
    "step tokens samples loss loss_main loss_mtp loss_balance lr grad_norm step_time tokens_per_second mfu "
    "moe_max_violation moe_load bias_speed mtp_weight batch_sequences skipped"
).split()


def test_every_step_has_the_contracts_keys_and_the_loss_is_their_sum(tmp_path):
    config = make_config(tmp_path, "optim.balance_alpha=0.01", "batch.micro_sequences=2")
    assert run(config) == 0
    rows = metrics(config)
    assert len(rows) == 6
    for number, row in enumerate(rows, start=1):
        assert set(CONTRACT) <= set(row)
        assert (row["step"], row["samples"], row["tokens"]) == (number, 4 * number, 64 * number)
        assert len(row["loss_mtp"]) == 2 and len(row["moe_load"]) == 4
        assert all(sum(load) == 64 * 3 for load in row["moe_load"])
        mixed = sum(0.5 * loss for loss in row["loss_mtp"])
        assert row["loss"] == pytest.approx(row["loss_main"] + 0.3 * mixed + 0.01 * row["loss_balance"], rel=1e-12)
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_time"], rel=1e-9)
        flops = row["tokens_per_second"] * flops_per_token(config.model, 16)
        assert row["mfu"] == pytest.approx(flops / 1e12, rel=1e-9)  # telemetry.peak_tflops=1.0


def test_printing_outlives_the_reader_of_the_output():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        print("into nothing", file=LastingOutput(output), flush=True)
        console = Console(file=LastingOutput(output))
        console.print("line")
        console.print("another")


def test_max_violation_is_the_worst_layers_largest_load_over_its_mean():
    assert max_violation([[1, 1, 1, 1], [0, 6, 1, 1]]) == 6 / 2 - 1
    assert max_violation([]) == 0.0


def test_non_finite_numbers_are_null_and_later_lines_go_on_resume(tmp_path):
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path, 0)
    for step in (1, 2, 3):
        lines.write({"step": step, "loss": float("nan") if step == 2 else 1.5, "list": [float("inf")]})
    lines.close()
    JsonLines(path, 2).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.5, "list": [None]}, {"step": 2, "loss": None, "list": [None]}
    ]


def test_lines_wait_for_room_where_the_disk_is_full(tmp_path):
    """The full disk is a limit on file sizes: a write up to it is cut, the next one fails with EFBIG."""
    path, said = tmp_path / "m.jsonl", []
    rows = [{"step": step, "text": 50 * "x"} for step in range(1, 6)]
    lines, limits = JsonLines(path, 0, said.append), resource.getrlimit(resource.RLIMIT_FSIZE)
    lines.write(rows[0])
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # room for the beginning of a line
    try:
        lines.write(rows[1])
        lines.write(rows[2])
        assert path.stat().st_size == size + 10
        assert len(said) == 1 and f"{path}: file too large; its lines wait in memory" in said[0]
        assert lines.records() == rows[:3]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines.write(rows[3])
    assert said[1:] == [f"{path}: there is room again, and what waited is written"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:4]
    lines.write(rows[4])
    lines.close()
    assert len(said) == 2 and [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_what_waits_for_room_is_written_at_the_end_if_there_is_some_by_then(tmp_path):
    path = tmp_path / "m.jsonl"
    lines, limits = JsonLines(path, 0, lambda line: None), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, limits[1]))
    try:
        lines.write({"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    lines.close()
    assert path.read_text() == '{"step": 1}\n'


def test_bytes_that_are_no_text_cost_their_own_line_only(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xff\xfe\0\0\n{"step": 2}\n')
    JsonLines(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_evaluation_counts_bits_over_the_bytes_of_the_predicted_text(tmp_path):
    """A model of equal logits spends log2(vocab) bits on each of the held-out tokens."""
    import math
    from pathlib import Path

    config = make_config(tmp_path, "eval.at_end=true", "run.steps=1", "schedule.learning_rate=[{until: 1e6, value: 0}]")
    config.model.initializer_range = 0.0
    assert run(config) == 0
    record = json.loads((tmp_path / "runs/run/eval.jsonl").read_text())
    assert record["whole"] and record["loss"] == pytest.approx(math.log(config.model.vocab_size), rel=1e-6)
    corpus = json.loads(next(Path(config.data.cache).glob("*/corpus.json")).read_text())
    assert record["heldout_tokens"] == corpus["heldout_tokens"] - 1
    assert record["heldout_bytes"] == corpus["heldout_bytes"]
    bits = record["heldout_tokens"] * math.log2(config.model.vocab_size)
    assert record["bits_per_byte"] == pytest.approx(bits / record["heldout_bytes"], rel=1e-6)


ROW = dict(step=5, loss_main=8.3457, loss_mtp=[8.358], lr=2e-3, grad_norm=1.5, tokens_per_second=2807.0, mfu=0.23,
           moe_max_violation=0.54, skipped=False)


def on_a_terminal(columns: int) -> tuple[RunConsole, io.StringIO]:
    console, screen = RunConsole(10), io.StringIO()
    console.console = Console(file=screen, force_terminal=True, width=columns, highlight=False, soft_wrap=True)
    return console, screen


def test_an_evaluation_in_the_middle_of_the_steps_shows_its_own_bar_on_a_terminal():
    console, screen = on_a_terminal(120)
    console.begin(0, 10)
    console.step(ROW, 5, 10)
    with console.task("evaluation of 64 held-out sequences") as show:
        show(1, 2)
        console.live.refresh()
    console.end()
    with console.task("evaluation of the whole held-out text") as show:
        show(1, 2)
    assert "evaluation of 64 held-out sequences" in screen.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_the_bar_and_the_time_left_survive_a_narrow_terminal(columns):
    console, screen = on_a_terminal(columns)
    console.begin(0, 10)
    console.step(ROW, 5, 10)
    console.live.refresh()
    console.end()
    last = [line for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue()).splitlines() if line][-1]
    assert re.match(r"[━╺╸]{20} [\d-]:[\d-]{2}:[\d-]{2} step 5  loss", last) and len(last) <= columns
