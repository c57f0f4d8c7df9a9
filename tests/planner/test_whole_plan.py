"""`dstrain plan` with a cluster: published figures, sums done by hand, and layouts that cannot be."""

import itertools
import json

import pytest

from dstrain.cli import main
from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.model.unit import Unit, list_units
from dstrain.planner import search
from dstrain.planner.job import Job
from dstrain.planner.measured import load_factors
from dstrain.planner.memory import GIB
from dstrain.planner.plan import Plan, whole_run
from dstrain.planner.stages import fastest_stages
from dstrain.planner.times import Times
from dstrain.planner.work import attention_work, experts_work, head_work

V3 = ["recipe=deepseek_v3", "precision=fp8", "parallel.dispatch=fp8", "cluster=h800_2048"]
# what fastest_stages finds for the measured times
STAGES = "parallel.stages=[4,4,4,4,4,4,4,4,4,4,4,4,4,5,4,3]"
TINY = ["model=tiny", "cluster=cpu_2cores", "run.device=cpu", "precision=fp32", "batch.sequences=32",
        "batch.micro_sequences=1", "data.sequence_length=64"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(*overrides) -> Plan:
    config = compose("plan", list(overrides))[0]
    return Plan.of(job := Job.of(config), Times(job, load_factors(config.phases) if config.phases else {}))


def test_papers_layout_with_the_published_medians_costs_about_the_published_hours():
    """REFERENCE §2: PP16, EP64, MTP depth 1, batch 15360: 180K H800 hours per trillion tokens; here 202K, 12 % more."""
    plan = make(*V3, "phases=h800_v3", STAGES)
    assert plan.gpu_hours_per_trillion_tokens == pytest.approx(180_000, rel=0.15)
    assert plan.step.pair.seconds * 1e3 == pytest.approx(130.5, abs=0.1)
    assert plan.over <= 0  # and it fits into an H800's memory
    assert sum(plan.step.parts.values()) == pytest.approx(plan.step.seconds)
    # 120 micro-batches, each a pair on average, of 9 blocks on the slowest rank: nothing can be faster
    blocks = plan.times.blocks[True].sum("FBW", communicates=False)
    assert plan.step.seconds > 120 / 2 * 9 * blocks


def test_json_has_the_keys_that_other_programs_read(capsys):
    assert main(["plan", *V3, "phases=h800_v3", STAGES, "output=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == {"main": 671_026_404_352, "per_mtp": 11_610_067_968, "total": 682_636_472_320,
                                   "activated": 37_552_282_624}
    memory = found["memory_gib"]
    assert memory["total"] == pytest.approx(sum(memory[kind] for kind in (
        "weights", "gradients", "optimizer", "activations", "buffers")))
    for key in ("step_seconds", "tokens_per_second_per_gpu", "mfu", "gpu_hours_per_trillion_tokens", "pair_ms",
                "hidden_fraction", "bubble_fraction"):
        assert isinstance(found[key], float) and found[key] > 0, key
    speed = found["tokens_per_second_per_gpu"]
    assert speed == pytest.approx(15360 * 4096 / found["step_seconds"] / 2048)
    assert found["gpu_hours_per_trillion_tokens"] == pytest.approx(1e12 / speed / 3600)
    assert found["run"]["price"] == pytest.approx(2.0 * found["run"]["gpu_hours"])


def test_products_of_a_v3_layer_by_hand():
    """4096 tokens; multiply-adds a token of each matrix, from the shapes of REFERENCE §1."""
    job = make(*V3, STAGES).job
    query, latent, output = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 512 * 128 * 256, 128 * 128 * 7168
    work = attention_work(job, True)
    assert work["F"].linear == work["W"].linear == 2 * 4096 * (query + latent + output)
    assert work["F"].wide == 2 * 4096 * 7168 * 256
    assert work["F"].core == 2 * 4096 * 128 * (192 + 128) * 4097 / 2  # causal: half of the keys
    assert experts_work(job, True)["F"].linear == experts_work(job, False)["F"].linear == 2 * 4096 * 9 * 3 * 7168 * 2048
    assert head_work(job)["F"].wide == 3 * 2 * 4096 * 7168 * 129280  # with both gradients


def test_bytes_to_experts_of_v3():
    """EP64 over 8 nodes, at most 4 of them a token: FP8 codes, a scale byte per 128 and weights out, BF16 back."""
    plan = make(*V3, STAGES)
    links = {name: link for name, link in plan.times.links.items()}
    nodes = 4 * 7 / 8  # other nodes that a token visits, where it has an expert in each of its four groups
    assert links["combine"].slow / 4096 == pytest.approx(nodes * 7168 * 2, rel=0.02)
    assert links["dispatch"].slow / 4096 == pytest.approx(nodes * (7168 + 56 + 8 * 4 + 8 * 4), rel=0.02)


@pytest.mark.parametrize("more", [["parallel.schedule=dualpipe"], ["parallel.schedule=dualpipev"],
                                  ["parallel.schedule=1f1b"], ["parallel.schedule=zb1p"]])
def test_time_grows_by_the_same_for_every_micro_batch(more):
    """What the ramp's sizes between the smallest and the full one are priced by."""
    plan = make(*TINY, "cluster.gpus=2", "parallel.pp=2", *more)
    seconds = [plan.step_seconds(sequences) for sequences in (16, 20, 24, 32)]
    step = (seconds[3] - seconds[0]) / 16
    assert seconds[1] == pytest.approx(seconds[0] + 4 * step, rel=0.01)
    assert seconds[2] == pytest.approx(seconds[0] + 8 * step, rel=0.01)


def test_run_follows_the_ramp():
    """Sequences of 64 tokens; by hand: 8, 16, 24 sequences on the way to 32, each from where its tokens begin."""
    plan = make(*TINY, "cluster.gpus=1", "schedule.tokens=20000", "batch.ramp={start: 8, until: 4096, multiple: 8}")
    run = whole_run(plan)
    consumed, seconds, steps = 0, 0.0, 0
    while consumed < 20000:
        size = 32 if consumed >= 4096 else 8 + int(24 * consumed / 4096) // 8 * 8
        seconds, consumed, steps = seconds + plan.step_seconds(size), consumed + size * 64, steps + 1
    assert run.steps == steps and run.gpu_hours == pytest.approx(seconds / 3600)


def test_backward_of_a_pair_begins_with_the_last_block():
    """Beside one MoE forward: the backward of a stage's last block, where that is a MoE block both hide each other."""
    times = make(*V3, STAGES, "phases=h800_v3").times
    dense, moe = Unit("block", 0), Unit("block", 9)
    beside, behind = (times.pair(times.stage([moe]), times.stage(units)) for units in ([dense, moe], [moe, dense]))
    assert beside.seconds < behind.seconds and beside.hidden > behind.hidden


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_fastest_partition_is_the_best_of_all(schedule):
    """Against every partition of the units, on few ranks: the slowest rank's time a micro-batch."""
    plan = make(*TINY, "cluster.gpus=2", "parallel.pp=2", f"parallel.schedule={schedule}")
    times, units = plan.times, list_units(plan.job.config.model)

    def cost(counts):
        ends = [0, *itertools.accumulate(counts)]
        stages = [times.stage(units[a:b]) for a, b in itertools.pairwise(ends)]
        if schedule == "1f1b":
            return max(stage.alone("FBW") for stage in stages)
        return times.pair(stages[0], stages[1]).seconds + times.pair(stages[1], stages[0]).seconds

    every = [(first, len(units) - first) for first in range(1, len(units))]
    found = fastest_stages(plan.job, times, plan.held)
    assert cost(found) <= min(map(cost, every)) * 1.003
    assert sum(found) == len(units)


def test_fastest_partition_keeps_the_memory():
    plan = make(*TINY, "cluster.gpus=4", "parallel.pp=4", "parallel.schedule=1f1b", "cluster.reserved_gib=0")
    free = fastest_stages(plan.job, plan.times, plan.held)
    fast = make(*TINY, "cluster.gpus=4", "parallel.pp=4", f"parallel.stages={free}")
    totals = [memory.total for memory in fast.memory]
    limit = (min(totals) + 3 * max(totals)) / 4 / GIB
    tight = make(*TINY, "cluster.gpus=4", "parallel.pp=4", "cluster.reserved_gib=0", f"cluster.memory_gib={limit}")
    counts = fastest_stages(tight.job, tight.times, tight.held)
    if counts is not None:
        kept = make(*TINY, "cluster.gpus=4", "parallel.pp=4", f"parallel.stages={counts}", "cluster.reserved_gib=0")
        assert max(memory.total for memory in kept.memory) <= limit * GIB
    none = make(*TINY, "cluster.gpus=4", "parallel.pp=4", "cluster.reserved_gib=0", "cluster.memory_gib=0.001")
    assert fastest_stages(none.job, none.times, none.held) is None


def test_search_finds_only_what_can_run_and_says_why_not():
    config = compose("plan", [*TINY, "cluster.gpus=4"])[0]
    found, dropped = search.search(config, {})
    assert found and [one.speed for one in found] == sorted((one.speed for one in found), reverse=True)
    for one in found:
        again = make(*TINY, "cluster.gpus=4", *(text.strip("'") for text in one.overrides().split()))
        assert again.tokens_per_second_per_gpu == pytest.approx(one.speed) and again.over <= 0
    own = [one for one in found if one.stages is None]
    assert sum(dropped.values()) + len(own) <= len(list(search.candidates(config)))


def test_layout_that_does_not_fit_is_printed_and_then_one_line(capsys):
    code = main(["plan", *TINY, "cluster.gpus=4", "cluster.memory_gib=0.32", "output=json"])
    out, err = capsys.readouterr()
    assert code == 2 and json.loads(out)["fits"] is False
    assert "more than the 0.32 of cluster cpu_2cores (most of it buffers" in err and err.count("\n") == 1
    assert "; nearest that work: parallel." in err or "; no layout works" in err


def test_layout_that_cannot_be_names_layouts_that_can(capsys):
    assert main(["plan", *TINY, "cluster.gpus=4", "parallel.pp=3"]) == 2
    err = capsys.readouterr().err
    assert "parallel.pp=3 times parallel.ep=1 is 3, which does not divide the world size of 4" in err
    assert "; nearest that work: parallel.pp=" in err and err.count("\n") == 1


def test_more_load_on_the_experts_takes_more_time_and_memory():
    even, uneven = make(*V3, STAGES), make(*V3, STAGES, "expert_load=1.5")
    assert uneven.step.seconds > even.step.seconds and uneven.over > even.over
    assert uneven.times.links["dispatch"].slow == pytest.approx(1.5 * even.times.links["dispatch"].slow)


def test_phases_file_with_an_unknown_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("run: [model=tiny, cluster=cpu_2cores]\nmilliseconds: {atention F: 1}\n")
    with pytest.raises(InputError, match=r"unknown phase 'atention F' \(did you mean 'attention F'\?\)"):
        load_factors(str(path))
