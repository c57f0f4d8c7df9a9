"""Where a rank stands, and who holds what with it. Right values: DESIGN §4's formula, and sets written by hand."""

import pytest
import torch
from layouts import CONFIG, LAYOUTS, Layout

from dstrain.config.errors import InputError
from dstrain.model.model import Model
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.replicas import Replicas, holds


def test_coordinates_are_those_of_the_formula():
    """rank = (pp_rank · edp + i) · ep + j, data rank i · ep + j: pp 2 × edp 3 × ep 4, rank by rank."""
    rank = 0
    for pp_rank in range(2):
        for i in range(3):
            for j in range(4):
                mesh = Mesh(24, rank, pp=2, ep=4)
                assert (mesh.edp, mesh.dp) == (3, 12)
                assert (mesh.pp_rank, mesh.edp_rank, mesh.ep_rank, mesh.data_rank) == (pp_rank, i, j, 4 * i + j)
                assert mesh.rank_of(pp_rank, i, j) == rank
                rank += 1


def test_a_single_process_needs_no_torch_distributed():
    mesh = Mesh(1, 0)
    mesh.connect(None)
    replicas = Replicas(mesh, CONFIG)
    replicas.connect(None)
    assert not torch.distributed.is_initialized()
    assert replicas.group("lm_head.weight").size == mesh.world_group.size == 1
    assert mesh.world_group.total(torch.tensor([1.5, 2.0]), "").tolist() == [1.5, 2.0]
    assert mesh.host_group.gather_objects("x", "") == ["x"] and replicas.experts == range(8)


@pytest.mark.parametrize(
    "world, pp, ep, message",
    [
        (12, 4, 2, "parallel.pp=4 times parallel.ep=2 is 8, which does not divide the world size of 12; valid: "
                   "parallel.pp=4 with parallel.ep one of 1, 3, or parallel.ep=2 with parallel.pp one of 1, 2, 3, 6, "
                   "or a world size that is a multiple of 8"),
        (6, 4, 1, "valid: parallel.ep=1 with parallel.pp one of 1, 2, 3, 6, or a world size that is a multiple of 4"),
        (1, 2, 1, "is 2, which does not divide the world size of 1"),
        (4, 0, 1, "parallel.pp=0: must be at least 1"),
        (4, 1, -2, "parallel.ep=-2: must be at least 1"),
    ],
)
def test_a_layout_that_does_not_fit_the_world_is_refused_with_what_would(world, pp, ep, message):
    with pytest.raises(InputError) as error:
        Mesh(world, 0, pp, ep)
    assert message in str(error.value)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match=r"parallel.ep=3 .*n_routed_experts=8; valid: 1, 2, 4, 8"):
        Replicas(Mesh(3, 0, ep=3), CONFIG)


EXPERT, DENSE = "model.layers.{}.mlp.experts.up_proj.weight", "model.layers.{}.self_attn.o_proj.weight"
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@pytest.mark.parametrize(
    "layout, size, rank, name, ranks",
    [
        # pp 2 × edp 2 × ep 2; the head's stage also has both MTP modules (layers 3, 4), so embedding is on both ends.
        ("pp 2, ep 2", 8, 5, EXPERT.format(2), (5, 7)),
        ("pp 2, ep 2", 8, 2, EXPERT.format(1), (0, 2)),
        ("pp 2, ep 2", 8, 2, DENSE.format(1), (0, 1, 2, 3)),
        ("pp 2, ep 2", 8, 5, EMBED, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("pp 2, ep 2", 8, 5, HEAD, (4, 5, 6, 7)),
        ("pp 2, ep 2", 8, 5, NORM, (4, 5, 6, 7)),
        ("pp 2, ep 2", 8, 6, "model.layers.4.shared_head.norm.weight", (4, 5, 6, 7)),
        # DualPipe: stage 0 and 3 on ranks 0 and 3, stages 1 and 2 on ranks 1 and 2.
        ("dualpipe pp 4", 4, 0, DENSE.format(0), (0, 3)),
        ("dualpipe pp 4", 4, 1, EXPERT.format(2), (1, 2)),
        ("dualpipe pp 4", 4, 3, EMBED, (0, 3)),
        ("dualpipe pp 2, ep 2", 8, 6, EXPERT.format(1), (0, 2, 4, 6)),
        ("dualpipe pp 2, ep 2", 8, 6, DENSE.format(1), tuple(range(8))),
        ("dualpipe pp 2, ep 2", 4, 3, EXPERT.format(4), (1, 3)),
    ],
)
def test_the_replica_group_of_a_name(layout, size, rank, name, ranks):
    assert LAYOUTS[4][layout].replicas(size, rank).ranks(name) == ranks


@pytest.mark.parametrize("size, name", [(size, name) for size in LAYOUTS for name in LAYOUTS[size]])
def test_a_rank_holds_exactly_the_names_of_its_model(size, name):
    """Names by rule against the modules that are built: every tensor of a rank's model is held, and no other."""
    with torch.device("meta"):
        whole = Model(CONFIG, torch.float32).state_dict()
        for share in LAYOUTS[size][name].shares():
            assert {n for n in whole if holds(share, n)} == set(Model(CONFIG, torch.float32, share).state_dict())


def test_experts_are_ranges_of_the_whole_layer():
    for rank, experts in enumerate([range(0, 4), range(4, 8), range(0, 4), range(4, 8)]):
        replicas = Layout(ep=2).replicas(4, rank)
        assert replicas.experts == replicas.share.experts == experts
        assert replicas.first(EXPERT.format(1)) == experts.start and replicas.first(DENSE.format(1)) == 0
        assert replicas.global_shape(EXPERT.format(1), (4, 5, 6)) == (8, 5, 6)
        assert replicas.global_shape(DENSE.format(1), (4, 5)) == (4, 5)
