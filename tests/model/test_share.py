"""A rank's share of a model: exactly the parameters its units need, under the names they have in the whole model."""

import pytest
import torch
from oracle import tiny_config

from dstrain.model.model import Model
from dstrain.model.share import Share
from dstrain.model.unit import list_units

CONFIG = tiny_config()  # 3 blocks, the first dense, and 2 MTP modules: layers 3 and 4
UNITS = list_units(CONFIG)  # embed, block 0, 1, 2, head, mtp 1, mtp 2
WHOLE = {name: tensor.shape for name, tensor in Model(CONFIG, torch.float32).state_dict().items()}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.mark.parametrize(
    "first, last, layers, others",
    [
        (0, 2, [0], [EMBEDDING]),
        (1, 3, [0, 1], []),
        (3, 5, [2], [HEAD, NORM]),
        (4, 5, [], [HEAD, NORM]),
        (4, 6, [3], [EMBEDDING, HEAD, NORM]),
        (6, 7, [4], [EMBEDDING, HEAD]),
        (0, 7, [0, 1, 2, 3, 4], [EMBEDDING, HEAD, NORM]),
    ],
)
def test_a_share_holds_what_its_units_need_under_global_names(first, last, layers, others):
    model = Model(CONFIG, torch.float32, Share.of_units(CONFIG, UNITS[first:last]))
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    expected = {name: shape for name, shape in WHOLE.items() if name in others or name.startswith(prefixes or "-")}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == expected
    assert [layer.layer for layer in model.layers] == layers
    assert [block.layer for block in model.blocks] == [layer for layer in layers if layer < 3]
    assert [module.layer for module in model.mtp_modules] == [layer for layer in layers if layer >= 3]
    assert model.moe_layers == [layer for layer in layers if layer > 0] and len(model.routers) == len(model.moe_layers)
    assert all(model.routers[i] is model.layer(number).mlp.gate for i, number in enumerate(model.moe_layers))
    assert model.device == torch.device("cpu")


def test_two_stages_of_a_rank_make_one_share_with_one_copy_of_the_embedding():
    model = Model(CONFIG, torch.float32, Share.of_units(CONFIG, [*UNITS[:2], UNITS[6]]))
    assert [layer.layer for layer in model.layers] == [0, 4]
    assert sum(name == EMBEDDING for name, _ in model.named_parameters()) == 1
    assert model.mtp_module(2) is model.layers[1]
    assert model.head_norm(2) is model.layers[1].shared_head.norm


def test_a_share_of_the_experts_leaves_the_router_whole():
    model = Model(CONFIG, torch.float32, Share.of_units(CONFIG, UNITS, experts=range(2, 5)))
    state = model.state_dict()
    assert state.keys() == WHOLE.keys()
    for name, shape in WHOLE.items():
        assert state[name].shape == ((3, *shape[1:]) if ".experts." in name else shape), name
    assert len(model.routers[0].load) == len(model.routers[0].e_score_correction_bias) == CONFIG.n_routed_experts
