"""The report's numbers are those of the run's files, whatever state these are in."""

import base64
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import make_config, metrics, run, status, train_model
from report_runs import Page, config, evaluation, row, write_run

from dstrain.cli import main
from dstrain.telemetry import report as report_module
from dstrain.telemetry.report_bins import Bins, LoadBins, starving
from dstrain.telemetry.report_panels import CELLS, run_data
from dstrain.telemetry.report_read import POINTS, Run, read_run


def page_of(*folders: Path, out: Path | None = None) -> Page:
    target = out or folders[0] / "report.html"
    assert main(["report", f"run={','.join(map(str, folders))}", *([f"out={out}"] if out else [])]) == 0
    return Page(target)


def decoded(load: dict) -> np.ndarray:
    """Load over mean [pieces, layers, experts] of the cube of bytes."""
    codes = np.frombuffer(base64.b64decode(load["codes"]), np.uint8)
    return 2 ** ((codes.reshape(len(load["first"]), len(load["layers"]), load["experts"]) - 160.0) / 24)


def test_a_run_writes_its_report_and_its_numbers_are_those_of_the_metrics(tmp_path):
    settings = make_config(tmp_path, "eval.every=2", "eval.sequences=8", "eval.at_end=true")
    assert run(settings) == 0
    folder, rows = tmp_path / "runs/run", metrics(settings)
    page = Page(folder / "report.html")
    (shown,) = page.numbers["runs"]
    assert shown["first"] == shown["last"] == [1, 2, 3, 4, 5, 6]
    assert shown["tokens"] == [line["tokens"] for line in rows]
    scalars = ("loss_main", "loss", "loss_balance", "lr", "grad_norm", "tokens_per_second", "mfu", "moe_max_violation",
               "bias_speed", "mtp_weight", "batch_sequences")
    expected = {key: [line[key] for line in rows] for key in scalars}
    expected |= {f"loss_mtp.{k}": [line["loss_mtp"][k] for line in rows] for k in range(2)}
    expected["data_epochs.train"] = [line["data_epochs"]["train"] for line in rows]
    for name, values in expected.items():
        assert shown["series"][name] == {"mean": pytest.approx(values, rel=1e-5)}, name
    records = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4, 6, 6]
    assert [e["loss"] for e in shown["evaluations"]] == pytest.approx([e["loss"] for e in records], rel=1e-5)
    depth_2 = [e["loss_mtp"][1] for e in records]
    assert [e["loss_mtp.1"] for e in shown["evaluations"]] == pytest.approx(depth_2, rel=1e-5)
    assert [e["whole"] for e in shown["evaluations"]] == [False, False, False, True]
    load = np.array([line["moe_load"] for line in rows], float)
    share = load / load.mean(-1, keepdims=True)
    assert decoded(shown["load"]) == pytest.approx(np.clip(share, 2 ** (-159 / 24), 2 ** (95 / 24)), rel=0.015)
    dense, layers = settings.model.first_k_dense_replace, settings.model.num_hidden_layers
    assert shown["load"]["layers"] == [*map(str, range(dense, layers)), f"{layers} (MTP 1)", f"{layers + 1} (MTP 2)"]
    for name, key, depth in (("accuracy", "accuracy", None), ("accuracy_mtp.0", "accuracy_mtp", 0)):
        values = [e[key] if depth is None else e[key][depth] for e in records]
        assert [e[name] for e in shown["evaluations"]] == pytest.approx(values, rel=1e-5)
    assert page.titles == ["Main loss", "MTP losses", "Balance loss", "Held-out accuracy", "Bits per byte",
                           "Gradient norm", "Learning rate", "Bias speed", "MTP weight", "Batch", "Tokens per second", "Model FLOPs utilization",
                           "Maximal violation", "Epochs"]
    mean = sum(line["loss_main"] for line in rows) / 6
    assert "finished" in page.text and f"{mean:.4f} mean of 6 steps" in page.text


def test_a_run_that_fails_or_is_stopped_has_a_report_that_says_so(tmp_path, monkeypatch):
    failing = make_config(tmp_path, "run.name=failing", "optim.max_skipped_steps=2",
                          "schedule.learning_rate=[{until: 1e6, value: 1e30}]")
    assert run(failing) == 1
    page = Page(tmp_path / "runs/failing/report.html")
    skipped = [line["step"] for line in metrics(failing) if line["skipped"]]
    assert len(skipped) == 2 and status(failing)["reason"] in page.text and "failed" in page.text
    for step in skipped:
        assert f"{step} (non-finite loss or gradient)" in page.text
    (shown,) = page.numbers["runs"]
    assert [step for step, count in zip(shown["first"], shown["skipped"]) if count] == skipped

    from dstrain.train.trainer import Trainer

    def signalled(trainer):
        if trainer.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "periodic", signalled)
    stopped = make_config(tmp_path, "run.name=stopped")
    assert run(stopped) == 0
    page = Page(tmp_path / "runs/stopped/report.html")
    assert "interrupted" in page.text and "SIGTERM" in page.text
    assert page.numbers["runs"][0]["last"] == list(range(1, status(stopped)["step"] + 1))


def test_a_report_that_cannot_be_made_leaves_the_run_as_it_is(tmp_path, monkeypatch, capsys):
    def broken(runs):
        raise RuntimeError("no page today")

    monkeypatch.setattr(report_module, "page", broken)
    settings = make_config(tmp_path, "run.steps=1")
    assert run(settings) == 0 and status(settings)["status"] == "finished"
    assert "WARNING: report.html was not written: RuntimeError: no page today" in capsys.readouterr().out
    assert not list((tmp_path / "runs/run").glob("*report*"))


def test_a_model_without_experts_and_mtp_has_no_panels_of_them(tmp_path):
    settings = make_config(tmp_path, model=train_model(num_nextn_predict_layers=0, first_k_dense_replace=3))
    assert settings.model.num_hidden_layers == 3 and run(settings) == 0
    page = Page(tmp_path / "runs/run/report.html")
    assert page.titles == ["Main loss", "Gradient norm", "Learning rate", "Bias speed", "MTP weight", "Batch",
                           "Tokens per second", "Model FLOPs utilization", "Epochs"]
    assert page.numbers["runs"][0]["load"] is None and "Starving" not in page.text and "Evaluations" not in page.text


def test_a_long_run_is_binned_and_bins_hold_mean_lowest_and_highest_of_their_steps(tmp_path):
    draw, steps = np.random.default_rng(0), 2500
    loss = draw.normal(size=steps)
    rows = [row(step, loss_main=loss[step - 1]) for step in range(1, steps + 1)]
    (shown,) = page_of(write_run(tmp_path / "run", rows)).numbers["runs"]
    first, last, series = np.array(shown["first"]), np.array(shown["last"]), shown["series"]["loss_main"]
    assert shown["width"] == 8 and len(first) == 313 <= POINTS
    assert first[0] == 1 and last[-1] == steps and (first[1:] == last[:-1] + 1).all()
    assert shown["tokens"] == [1000 * step for step in last]
    pieces = [loss[a - 1 : b] for a, b in zip(first, last)]
    for key, of in (("mean", np.mean), ("low", np.min), ("high", np.max)):
        assert series[key] == pytest.approx([of(piece) for piece in pieces], rel=2e-5, abs=1e-9), key


def test_a_series_that_begins_late_or_has_holes_stays_at_its_steps():
    bins = Bins(4)
    for step in range(1, 8):
        bins.add(step, step, {"late": float(step)} if step in (3, 7) else {}, {"rank": step % 2} if step > 4 else {})
    spans = [(span.first_step, span.last_step, span.steps) for span in bins.spans]
    assert spans == [(1, 2, 2), (3, 4, 2), (5, 6, 2), (7, 7, 1)]
    assert [one and one.mean for one in bins.series["late"]] == [None, 3.0, None, 7.0]
    assert [dict(counter) for counter in bins.named["rank"]] == [{}, {}, {1: 1, 0: 1}, {1: 1}]


def test_load_is_the_mean_of_load_over_mean_exactly_in_a_short_run_and_of_evenly_spaced_steps_in_a_long_one():
    def filled(steps):
        load = LoadBins(limit=8, most=4)
        for step in range(1, steps + 1):
            wanted = load.wants()
            load.add(step, step, [[step, 100 - step, 50, 50]] if wanted else None)
        return load

    short = filled(32)
    spans, shares = short.frames(8)
    assert [(span.first_step, span.last_step) for span in spans] == [(4 * i + 1, 4 * i + 4) for i in range(8)]
    assert short.counts.sum() == 32
    assert shares[:, 0, 0] == pytest.approx([(4 * i + 2.5) / 50 for i in range(8)])
    assert shares[:, 0, 2] == pytest.approx([1.0] * 8)
    spans, shares = short.frames(3)
    assert [(span.first_step, span.last_step) for span in spans] == [(1, 12), (13, 24), (25, 32)]
    assert shares[:, 0, 0] == pytest.approx([6.5 / 50, 18.5 / 50, 28.5 / 50])

    long = filled(99)  # bins of 16 steps, every fourth step looked at from the 65th on
    spans, shares = long.frames(8)
    assert [span.steps for span in spans] == [16] * 6 + [3] and 32 <= long.counts.sum() < 60
    for span, share in zip(spans, shares[:, 0, 0]):
        assert share == pytest.approx((span.first_step + span.last_step) / 2 / 50, abs=2 / 50)


def test_cutting_the_load_out_of_a_line_changes_no_number(tmp_path):
    rows = [row(step, moe_load=[[step, 2 * step, 3, 4]] * 3, skipped=step % 7 == 0) for step in range(1, 4001)]
    quick = read_run(write_run(tmp_path / "quick", rows))
    slow = read_run(write_run(tmp_path / "slow", rows, separators=(",", ":")))  # not as the trainer writes it
    assert 2048 <= quick.load.counts.sum() < slow.load.counts.sum() == 4000
    assert quick.bins == slow.bins and quick.skipped == slow.skipped == 571
    assert quick.load.frames(128)[1] == pytest.approx(slow.load.frames(128)[1], rel=0.05)


def test_starving_experts_are_those_under_a_tenth_of_the_mean_for_long():
    """By hand, of 200 steps: for long is for 20. Bins are two steps wide in the end."""
    load, shares = LoadBins(), []
    for step in range(1, 201):
        loads = np.full((2, 10), 100.0)
        loads[0, 3] = 8 if step > 150 else 100  # of 82, to the end
        loads[0, 4] = 12  # of 91 or 82: low, but above a tenth
        loads[1, 5] = 5 if 41 <= step <= 80 else 100
        loads[1, 6] = 5 if 41 <= step <= 56 else 100  # not for long
        loads[1, 7] = 5 if step % 20 else 400  # never for long without a break
        load.add(step, step * 1000, loads.tolist())
        shares.append(loads / loads.mean(1, keepdims=True))
    found = [(one.layer, one.expert, one.first.first_step, one.last.last_step, one.lasts) for one in starving(load)]
    assert found == [(0, 3, 151, 200, True), (1, 5, 41, 80, False)]
    assert [one.steps for one in starving(load)] == [50, 40]
    expected = np.mean(shares[150:], 0)[0, 3], np.mean(shares[40:80], 0)[1, 5]
    assert [one.share for one in starving(load)] == pytest.approx(expected, rel=1e-5)


def test_the_page_names_starving_experts_by_the_layer_of_the_checkpoint(tmp_path):
    rows = [row(step, moe_load=[[10, 10, 10]] * 2 + [[15, 0, 15]] + [[10, 10, 10]]) for step in range(1, 41)]
    page = page_of(write_run(tmp_path / "run", rows, config=config(dense=1, layers=3, depth=2)))
    assert "1 found, 1 of them still at the end." in page.text
    assert "layer expert load / mean steps 3 (MTP 1) 1 0.000 1 to the end" in page.text
    page = page_of(write_run(tmp_path / "other", rows, config=config(layers=9)))  # other layers than the load has
    assert "MoE 2 1 0.000 1 to the end" in page.text


def test_a_torn_last_line_is_no_step_and_no_complaint_and_other_damage_is_counted(tmp_path):
    folder = write_run(tmp_path / "run", [row(1), row(2)])
    whole = folder.joinpath("metrics.jsonl").read_bytes()
    folder.joinpath("metrics.jsonl").write_bytes(whole + json.dumps(row(3)).encode()[:-20])
    page = page_of(folder)
    assert page.numbers["runs"][0]["last"] == [1, 2] and "left out" not in page.text
    damaged = b'{"st\xff\xfe\0\n' + b"[" * 100000 + b'\n[1]\n{"loss": 1}\n{"step": true}\n\n' + whole
    folder.joinpath("metrics.jsonl").write_bytes(damaged)
    folder.joinpath("config.yaml").write_text("a: [1")
    folder.joinpath("status.json").write_text("[]")
    page = page_of(folder)
    assert page.numbers["runs"][0]["last"] == [1, 2]
    assert "left out config.yaml, status.json, 5 lines of metrics.jsonl, which cannot be read" in page.text


def test_a_run_without_a_step_yet(tmp_path):
    for rows, name in ((None, "no-metrics"), ([], "empty")):
        folder = write_run(tmp_path / name, rows or [], config=config())
        if rows is None:
            folder.joinpath("metrics.jsonl").unlink()
        page = page_of(folder)
        assert page.titles == [] and "No step has been taken yet" in page.text and "no status yet" in page.text


def test_nulls_of_skipped_steps_are_holes(tmp_path):
    gone = {"loss": None, "loss_main": None, "loss_mtp": [None, None], "grad_norm": None}
    hole = row(2, tokens=1000, skipped=True, spike=False, **gone)
    spike = row(3, tokens=1000, loss_main=50.0, skipped=True, spike=True)
    page = page_of(write_run(tmp_path / "run", [row(1), hole, spike, row(4)]))
    (shown,) = page.numbers["runs"]
    assert shown["series"]["loss_main"]["mean"] == pytest.approx([7.999, None, 50.0, 7.996])
    assert shown["series"]["loss_mtp.1"]["mean"] == pytest.approx([8.499, None, 8.497, 8.496])
    assert shown["skipped"] == [0, 1, 1, 0] and shown["tokens"] == [1000, 1000, 1000, 4000]
    assert "Skipped steps: 2 (non-finite loss or gradient), 3 (spike of the loss)." in page.text
    assert f"{(7.999 + 7.996) / 2:.4f} mean of 2 steps" in page.text  # of applied steps


def test_tokens_that_go_back_are_a_rollback(tmp_path):
    rows = [row(1), row(2), row(3, tokens=1000), row(4, tokens=2000)]
    assert "2 skipped" not in (text := page_of(write_run(tmp_path / "run", rows)).text) and ", 1 rollback " in text


def test_what_older_versions_did_not_write_is_left_out(tmp_path):
    rows = [{"step": 1, "loss_main": 3.0}, {"step": 2, "loss_main": 2.5, "loss_mtp": "?", "moe_load": [[1], [1, 2]],
                                            "mfu": "high", "data_shares": [1], "slowest_rank": None, "lr": 10**400, "grad_norm": math.inf,
                                            "step_time": math.nan}]
    page = page_of(write_run(tmp_path / "run", rows, [{"step": 2, "loss": 2.0}, {"step": 2, "tokens": 5, "loss": 2.0}]))
    assert page.titles == ["Main loss"]
    assert [e["tokens"] for e in page.numbers["runs"][0]["evaluations"]] == [5]


def test_mixture_and_ranks_are_drawn_where_they_are_there(tmp_path):
    more = {"data_shares": {"web": 0.7, "code": 0.3}, "data_task_shares": {"fact": 1.0}, "step_time_spread": 0.1,
            "dispatch_slow_bytes": 10, "dispatch_fast_bytes": 20}
    rows = [row(step, slowest_rank=3 if step < 9 else 1, **more) for step in range(1, 11)]
    page = page_of(write_run(tmp_path / "run", rows))
    panels = {panel["title"]: panel for panel in page.numbers["panels"]}
    assert panels["Shares of the sources"]["series"] == [["data_shares.web", "web"], ["data_shares.code", "code"]]
    assert panels["MTP losses"]["series"] == [["loss_mtp.0", "depth 1"], ["loss_mtp.1", "depth 2"]]
    assert {"Shares of the tasks", "Spread of step times", "Slowest rank", "Token dispatch"} <= set(panels)
    assert page.numbers["runs"][0]["series"]["slowest_rank"]["mean"] == [3] * 8 + [1] * 2
    assert "rank 3 in 80.0%, rank 1 in 20.0% of the steps" in page.text


def test_names_of_a_run_are_text_and_never_html(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    folder = write_run(tmp_path / "<b>&\"'x", [row(1, data_epochs={evil: 1.0})], config=config(comment=evil),
                       status={"status": "failed", "reason": evil})
    page = page_of(folder)
    assert len(page.scripts) == 2 and not [tag for tag, _ in page.tags if tag in ("b", "img")]
    assert page.text.count(evil) == 2 and "<b>&\"'x" in page.text  # reason and configuration
    assert f"data_epochs.{evil}" in page.numbers["runs"][0]["series"]
    hidden = page_of(write_run(tmp_path / "status", [row(1)], status={"status": "<i>finished</i>"}))
    assert "no status yet" in hidden.text


def test_several_runs_lie_over_each_other(tmp_path):
    a = write_run(tmp_path / "a", [row(1), row(2)], [evaluation(2)], config(seed=1), {"status": "finished"})
    b = write_run(tmp_path / "b", [row(1, layers=1)], config=config(seed=2))
    page = page_of(a, b, out=tmp_path / "both.html")
    assert [shown["name"] for shown in page.numbers["runs"]] == ["a", "b"]
    assert [shown["last"] for shown in page.numbers["runs"]] == [[1, 2], [1]]
    assert "Settings that differ a b run.seed 1 2" in page.text and "model.name" not in page.text
    assert [tag["data-run"] for name, tag in page.tags if name == "input" and "data-run" in tag] == ["0", "1"]
    assert main(["report", f"run=[{a}, {b}]", f"out={tmp_path / 'list.html'}"]) == 0
    assert Page(tmp_path / "list.html").numbers == page.numbers
    same = write_run(tmp_path / "elsewhere/a", [row(1)])
    assert [shown["name"] for shown in page_of(a, same, out=tmp_path / "o.html").numbers["runs"]] == [str(a), str(same)]


def test_the_page_says_where_it_is_and_a_comma_may_be_part_of_a_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/a,b", [row(1)])
    write_run(tmp_path / "runs/c", [row(1)])
    assert main(["report", "run=runs/a,b"]) == 0 and main(["report", "run=runs/a,b/,runs/c"]) == 2
    assert main(["report", "run=runs/c,runs/../runs/a"]) == 2
    assert capsys.readouterr().out == "runs/a,b/report.html\n"
    write_run(tmp_path / "runs/d", [row(1)])
    assert main(["report", "run=runs/c,runs/d"]) == 0
    assert capsys.readouterr().out == "report.html\n" and (tmp_path / "report.html").exists()


@pytest.mark.parametrize("arguments, line", [
    ([], "run has no value: give run=…"),
    (["run="], "run is empty or holds a null byte: must be a run folder, as in run=runs/tiny, or several"),
    (["run=[]"], "run=[]: must name a run folder, or several as in run=runs/a,runs/b"),
    (["run=mine"], "run=mine: is not a folder (did you mean runs/mine?); valid: the folder of a run"),
    (["run=nowhere"], "run=nowhere: is not a folder; valid: the folder of a run, as in run=runs/tiny"),
    (["run=runs"], "run=runs: holds neither metrics.jsonl nor config.yaml; valid:"),
    (["run=runs/mine/metrics.jsonl"], "metrics.jsonl: is not a folder; valid:"),
    (["run=runs/mine,runs/../runs/mine"], "mine is named twice"),
    (["run=" + ",".join("abcdefghijk")], "run=…: 11 runs; at most 10"),
    (["run=runs/mine", "out=none/report.html"], "out=none/report.html: the report cannot be written: No such file"),
    (["run=runs/mine", "out=runs"], "out=runs: the report cannot be written: Is a directory"),
    (["run=runs/mine", "out="], "out is empty or holds a null byte"),
    (["runs=runs/mine"], "unknown key 'runs' (did you mean 'run'?)"),
])
def test_bad_input_is_one_line_and_nothing_is_written(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/mine", [row(1)], config=config())
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.yaml", "eval.jsonl", "metrics.jsonl", "mine", "runs"]


def test_a_flagship_keeps_the_page_small():
    run = Run(Path("."), "flagship")
    load = (np.arange(62 * 256).reshape(62, 256) + 1).tolist()
    for step in range(1, 61):
        run.load.add(step, step, load)
    shown = run_data(run, CELLS)
    assert len(shown["load"]["first"]) == 30  # of CELLS // (62 * 256) = 37 that there is room for
    assert len(json.dumps(shown)) < 4 / 3 * CELLS + 10_000


def test_reports_need_no_torch():
    code = "import sys; from dstrain.cli import main; main(['report', 'run=none']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
