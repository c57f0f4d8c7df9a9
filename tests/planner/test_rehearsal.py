"""`dstrain plan rehearse=true` against real ranks, and what it says of layouts that cannot run."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from rehearsed import job_of, real_rank
from ranks import spawn

from dstrain.cli import main
from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.model.router import Router
from dstrain.parallel import buckets
from dstrain.parallel.layout import Layout
from dstrain.planner.holdings import holdings
from dstrain.planner.memory import memories
from dstrain.planner.plan import Plan
from dstrain.planner.rehearsal.ledger import Ledger
from dstrain.planner.rehearsal.loads import StatedLoads, routing_table
from dstrain.planner.rehearsal.rank import rehearse_rank
from dstrain.planner.rehearsal.whole import Disagreement, agree
from dstrain.precision.backends.shapes import Shapes
from dstrain.precision.fp8_gemm import GemmBackend

V3 = ["recipe=deepseek_v3", "precision=fp8", "parallel.dispatch=fp8", "cluster=h800_2048", "phases=h800_v3",
      "parallel.stages=[4,4,4,4,4,4,4,4,4,4,4,4,4,5,4,3]"]
DUALPIPE = ["cluster.gpus=4", "parallel.pp=2", "parallel.ep=2", "parallel.schedule=dualpipe"]
NODES = ["cluster.gpus=4", "cluster.gpus_per_node=2", "parallel.ep=4", "parallel.ranks_per_node=2"]


@pytest.mark.parametrize(("overrides", "load"), [(DUALPIPE, "balanced"), (NODES, "worst")])
def test_a_rehearsed_rank_is_the_real_rank(overrides, load):
    """Right values: four processes that train a step; their allocator's peak, messages and dispatchers' counts."""
    real = spawn(real_rank, 4, overrides, load, timeout=300.0)
    job = job_of(*overrides)
    for rank, (held, peak, sent, phases, counts) in enumerate(real):
        one = rehearse_rank(job, rank, load)
        for kind, size in held.items():
            assert one.peak.bytes[kind] == size, f"rank {rank}, {kind}"
        rest = one.peak.bytes["activations"] + one.peak.bytes["buffers"]
        assert rest == pytest.approx(peak, rel=0.01), f"rank {rank}"
        assert one.messages.shapes == sent, f"rank {rank}"
        assert one.phases == phases, f"rank {rank}"
        nodes = 2 if overrides is NODES else 1
        ep = job.layout.mesh.ep
        stated = StatedLoads(load, job.config.model, job.tokens, ep, nodes, rank % ep)
        assert counts and all(np.array_equal(one, stated.counts(nodes > 1)) for one in counts), f"rank {rank}"


LAYOUTS = {
    "data parallel": ["cluster.gpus=4"],
    "experts": ["cluster.gpus=4", "parallel.ep=4"],
    "1f1b": ["cluster.gpus=2", "parallel.pp=2", "parallel.schedule=1f1b"],
    "zb1p": ["cluster.gpus=2", "parallel.pp=2", "parallel.schedule=zb1p"],
    "dualpipe": ["cluster.gpus=8", "parallel.pp=4", "parallel.ep=2", "parallel.schedule=dualpipe"],
    "dualpipev": ["cluster.gpus=4", "parallel.pp=2", "parallel.ep=2", "parallel.schedule=dualpipev"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_memory_is_the_rehearsed(layout):
    """By kind, within 10 %. What a plan has as buffers is its most at any moment; at the peak there are few, so
    activations and buffers that are alive there are set beside the activations alone."""
    job = job_of(*LAYOUTS[layout], "cluster.reserved_gib=0")
    planned = memories(job, holdings(job))
    for pp_rank in range((job.layout.mesh.pp + 1) // 2):
        found, plan = rehearse_rank(job, pp_rank * job.layout.mesh.dp, "balanced").peak.bytes, planned[pp_rank]
        for kind in ("weights", "gradients", "optimizer"):
            assert getattr(plan, kind) == pytest.approx(found[kind], rel=0.01), (pp_rank, kind)
        active = found["activations"] + found["buffers"]
        assert plan.activations == pytest.approx(active, rel=0.1), pp_rank


@pytest.mark.parametrize("model", ["v3_671b", "v2_lite_16b", "tiny"])
@pytest.mark.parametrize("load", ["balanced", "worst"])
def test_a_router_can_give_the_stated_tables(model, load):
    """Right value: the model's own selection, of scores that are 1 where the table has an expert."""
    config = compose("plan", [f"model={model}"])[0].model
    table = torch.from_numpy(routing_table(load, config, 512, rank=3).copy())
    assert all(len(set(row)) == config.num_experts_per_tok for row in table.tolist())
    with torch.device("meta"):
        router = Router(config, torch.float32)
    if config.has_routing_bias:
        router.e_score_correction_bias = torch.zeros(config.n_routed_experts)
    scores = torch.zeros(512, config.n_routed_experts).scatter_(1, table, 1.0)
    assert torch.equal(router.select(scores).sort().values, table.sort().values)


def test_loads_of_v3():
    """EP64 on 8 nodes: balanced is even to the token; by hand, the worst gives the first rank 4 rows of every token."""
    model = compose("plan", V3)[0].model
    even = StatedLoads("balanced", model, 4096, 64, 8, 5)
    assert (even.rows.sum(0) == 4096 * 64 * 8 / 256).all() and even.load == 1
    assert (even.visits == 4096 * 4 / 8).all()  # four nodes a token
    worst = StatedLoads("worst", model, 4096, 64, 8, 0)
    assert worst.of(0).sum() == 4096 * 64 * 4 and worst.load == 32
    assert StatedLoads("worst", model, 4096, 64, 8, 2).load == 0
    counts = worst.counts(per_node=True)
    assert counts.shape == (2, 64, 33) and (counts[1, :, 0] == 4096).all()


def test_ledger_counts_a_storage_once_until_it_is_freed():
    with Ledger() as ledger:
        a = torch.empty(1000, device="meta")
        b = a.view(10, 100)[2:]
        c = a + a
        del a
        assert ledger.total == 8000
        ledger.count_as("weights", b)
        assert dict(ledger.bytes) == {"activations": 4000, "weights": 4000}
        del b
        d = torch.empty(10, device="meta", dtype=torch.bfloat16).add_(c[:10])
        assert ledger.total == 4020 and d is not None
    assert (ledger.peak.total, ledger.peak.bytes["weights"]) == (8000, 4000)


def test_ledger_gives_what_pytorch_gives():
    """A result that is known from before has the shape, strides and type of the first time, whatever the operands."""
    x, ids = torch.empty(6, 8, device="meta"), torch.empty(6, dtype=torch.int64, device="meta")
    square = torch.empty(8, 8, device="meta")
    operations = [lambda: x.t() + x.t(), lambda: square * square, lambda: square.t() * square.t(),
                  lambda: ids * 2, lambda: ids * 2.0, lambda: torch.cat((x, x[:2])),
                  lambda: x.sort(dim=1).indices, lambda: x.half() @ x.t().half(), lambda: x.sum(0), lambda: x.sum(1)]
    plain = [operation() for operation in operations]
    with Ledger():
        for _ in range(2):
            for operation, right in zip(operations, plain):
                found = operation()
                assert (found.shape, found.stride(), found.dtype) == (right.shape, right.stride(), right.dtype)


def test_shapes_of_fp8_are_the_definitions():
    """Grouped columns are the kernels': whole tiles of 128 for every tile that the definition counts."""
    x, weight = torch.randn(300, 200), torch.randn(3, 130, 200)
    offsets = torch.tensor([100, 100, 300], dtype=torch.int32)
    right, shapes = GemmBackend(), Shapes()

    def forms(found):
        return [(tuple(t.shape), t.dtype) for t in found]

    assert forms(shapes.quantize_rows(x)) == forms(right.quantize_rows(x))
    assert forms(shapes.quantize_columns(x, None)) == forms(right.quantize_columns(x, None))
    assert forms(shapes.quantize_e5m6(x)) == forms(right.quantize_e5m6(x))
    packed = right.quantize_e5m6(x)
    assert forms(shapes.e5m6_to_columns(*packed, 200)) == forms(right.e5m6_to_columns(*packed, 200))
    rows = right.quantize_rows(x)
    assert forms(shapes.requantize_columns(rows, None)) == forms(right.requantize_columns(rows, None))
    assert forms([shapes.dequantize_rows(rows, x.dtype)]) == forms([right.dequantize_rows(rows, x.dtype)])
    assert forms(shapes.rms_norm(x, x[0], 1e-6, True)[0]) == forms(right.rms_norm(x, x[0], 1e-6, True)[0])
    assert shapes.rms_norm(x, x[0], 1e-6, True)[1].shape == right.rms_norm(x, x[0], 1e-6, True)[1].shape
    for factor in (None, torch.ones(300)):
        (out, kept), (out_right, kept_right) = (one.swiglu(x, x, factor, True) for one in (shapes, right))
        assert forms(out) == forms(out_right) and list(map(forms, kept)) == list(map(forms, kept_right))
        ours, theirs = (one.swiglu_backward(x, *kept_right, factor, None) for one in (shapes, right))
        assert forms(ours[0]) == forms(theirs[0])
        for a, b in zip(ours[1:3], theirs[1:3]):
            assert list(map(forms, a)) == list(map(forms, b))
        assert (ours[3] is None) == (theirs[3] is None) and (factor is None or ours[3].shape == theirs[3].shape)
    for ours, theirs in zip(shapes.quantize_weight(weight), right.quantize_weight(weight)):
        assert forms(ours) == forms(theirs)
    ours, theirs = shapes.quantize_columns(x, offsets), right.quantize_columns(x, offsets)
    assert ours.scale.shape == theirs.scale.shape and ours.codes.shape == (200, 128 * theirs.scale.shape[1])
    assert shapes.grouped_matmul(rows, shapes.quantize_weight(weight)[0], offsets, x.dtype).shape == (300, 130)
    with pytest.raises(ValueError, match="for a gradient"):
        shapes.accumulate(ours, ours, torch.empty(200, 199))


# What it says -------------------------------------------------------------------------------------------------------

TINY = ["model=tiny", "cluster=cpu_2cores", "run.device=cpu", "precision=fp32", "batch.sequences=32",
        "batch.micro_sequences=1", "data.sequence_length=32", *DUALPIPE]


def test_a_plan_with_its_rehearsal(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *TINY, "rehearse=true", "output=json"]) == 0
    out, err = capsys.readouterr()
    assert "rehearsed rank 2, pipeline rank 2 of 2" in err
    found = json.loads(out)["rehearsal"]
    assert [(one["rank"], one["load"]) for one in found["ranks"]] == [
        (0, "balanced"), (2, "balanced"), (0, "worst"), (2, "worst")]
    for one in found["ranks"][:2]:
        for kind in ("weights", "gradients", "optimizer"):
            assert one["memory_gib"][kind] == pytest.approx(one["planned_gib"][kind], rel=0.01)
    sent, planned = found["sent_gib"], json.loads(out)["sent_gib"]
    for what in ("experts", "pipeline", "gradients", "weights"):
        assert sum(sent[what].values()) == pytest.approx(sum(planned[what].values()), rel=0.02), what


def test_an_error_of_a_rank_has_its_number(capsys, monkeypatch):
    plain = Layout.dispatcher

    def dispatcher(self, device, dtype):
        if self.mesh.pp_rank == 1:
            raise InputError("parallel.ep=2: the experts are on strike")
        return plain(self, device, dtype)

    monkeypatch.setattr(Layout, "dispatcher", dispatcher)
    assert main(["plan", *TINY, "rehearse=true"]) == 2
    assert "dstrain: rank 2: parallel.ep=2: the experts are on strike" in capsys.readouterr().err


def test_a_failure_in_a_rank_is_noted_with_its_number(capsys, monkeypatch):
    plain = Layout.users

    def users(self, names):
        if self.mesh.rank == 2:
            raise KeyError("lost")
        return plain(self, names)

    monkeypatch.setattr(Layout, "users", users)
    assert main(["plan", *TINY, "rehearse=true"]) == 1
    assert "in the rehearsal of rank 2 of 4, pipeline rank 1, balanced load" in capsys.readouterr().err


def test_ranks_that_would_wait_for_each_other(monkeypatch):
    """DualPipe holds every stage twice; here the second rank cuts the gradients of its copy otherwise."""
    job = job_of(*DUALPIPE)
    ranks = [rehearse_rank(job, 0, "balanced")]
    plain = buckets.lay_out
    monkeypatch.setattr("dstrain.train.optimizer.lay_out", lambda p, r, main, bucket: plain(p, r, main, 1 << 16))
    ranks.append(rehearse_rank(job, 2, "balanced"))
    with pytest.raises(Disagreement, match=r"ranks 0 and 2 of one group of \d: \('gradients', "):
        agree(job, ranks)
    ranks[1].messages.order.clear()
    agree(job, ranks)
    ranks[1].messages.received[0, 2].pop()
    with pytest.raises(Disagreement, match=r"rank 0 sends rank 2 .* as number \d+, where the other has nothing"):
        agree(job, ranks)


def test_a_rank_that_does_not_fit(capsys, monkeypatch):
    """The plan is taken to be content; by its own figures the rehearsal is not."""
    monkeypatch.setattr(Plan, "over", -1.0)
    tight = ["cluster.reserved_gib=0.01", "cluster.memory_gib=0.05"]
    assert main(["plan", *TINY, *tight, "rehearse=true", "output=json"]) == 2
    out, err = capsys.readouterr()
    own = json.loads(out)["rehearsal"]["ranks"][0]
    total = max(own["memory_gib"]["total"], own["start_gib"] + 0.01)
    assert json.loads(out)["rehearsal"]["largest_load"] is None
    assert f"rank 0 (pipeline rank 0) reaches {total:.2f} GiB in the rehearsal, {total - 0.05:.2f} more than" in err


@pytest.mark.parametrize("command", [["plan", "model=tiny"], ["plan", *TINY, "search=true"]])
def test_a_rehearsal_is_of_one_layout(command, capsys):
    assert main([*command, "rehearse=true"]) == 2
    assert "rehearse=true: is of one layout on a cluster" in capsys.readouterr().err


@pytest.mark.long
def test_the_flagship_from_a_laptop():
    """2048 ranks, real sizes: 16 distinct ranks, in less than 8 GB; state to 1 %, activations to 10 % of the plan's."""
    program = [sys.executable, "-m", "dstrain", "plan", *V3, "rehearse=true", "output=json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 8e9
    found = json.loads(done.stdout)["rehearsal"]
    even = [one for one in found["ranks"] if one["load"] == "balanced"]
    assert [one["rank"] for one in even] == [128 * p for p in range(16)]
    for one in even:
        own, planned = one["memory_gib"], one["planned_gib"]
        for kind in ("weights", "gradients", "optimizer"):
            assert own[kind] == pytest.approx(planned[kind], rel=0.01), (one["rank"], kind)
        assert own["total"] <= 79.1
        assert own["total"] == pytest.approx(planned["total"], rel=0.05), one["rank"]
