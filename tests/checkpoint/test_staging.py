"""The copy that a save writes from, and work on several files at once."""

import threading
import time

import pytest
import torch

from dstrain.checkpoint.in_threads import in_threads
from dstrain.checkpoint.staging import Staging
from dstrain.checkpoint.tensors import Piece


def kinds():
    wide = torch.arange(24.0).view(4, 6)
    return {
        "odd": torch.arange(7, dtype=torch.uint8), "wide": wide.double(), "strided": wide.t()[1:4],
        "scalar": torch.tensor(3), "empty": torch.zeros(0, 5),
        "flags": torch.tensor([True, False, True]), "half": wide.bfloat16(),
        "fp8": wide.to(torch.float8_e4m3fn), "part": Piece(wide[1:3], (8, 6), (4, 0)),
    }


def test_copies_are_equal_contiguous_and_share_nothing_with_their_tensors():
    tensors = kinds()
    copies = Staging().copy(tensors)
    assert copies.keys() == tensors.keys() and copies["part"].shape == (8, 6) and copies["part"].offset == (4, 0)
    for name, part in kinds().items():
        source = tensors[name].tensor if isinstance(tensors[name], Piece) else tensors[name]
        right = part.tensor if isinstance(part, Piece) else part
        source.view(torch.uint8).zero_() if source.is_contiguous() and source.ndim else source.zero_()
        copy = copies[name].tensor
        assert copy.is_contiguous() and copy.dtype == right.dtype and copy.shape == right.shape
        assert torch.equal(copy.double(), right.double()), name


def test_memory_is_kept_for_the_next_save_and_grows_where_it_must():
    staging = Staging()
    first = staging.copy({"a": torch.ones(1000)})["a"].tensor
    again = staging.copy({"b": torch.full((10,), 2.0), "a": torch.ones(900)})
    assert again["b"].tensor.data_ptr() == first.data_ptr()
    larger = staging.copy({"a": torch.full((5000,), 3.0)})["a"].tensor
    assert larger.eq(3).all() and again["a"].tensor.eq(1).all()  # what somebody still holds stays
    assert len(staging.copy({})) == 0


def test_results_come_in_order_and_several_threads_work():
    both = threading.Barrier(2, timeout=20)  # broken if one thread did all
    assert in_threads(lambda n: (both.wait(), 10 * n)[1], range(6), 2) == [0, 10, 20, 30, 40, 50]
    assert in_threads(lambda n: n, [], 4) == []
    here = threading.get_ident()
    assert in_threads(lambda n: threading.get_ident(), range(3), 1) == [here] * 3


def test_the_first_error_is_raised_and_nothing_new_begins():
    begun = []

    def work(n):
        begun.append(n)
        if n == 1:
            raise ValueError("one")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="one"):
        in_threads(work, range(100), 2)
    assert len(begun) <= 4
