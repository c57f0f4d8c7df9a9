"""What comes back from a checkpoint: the same bits, only for the names that were asked for, and never executed code."""

import errno
import pickle

import pytest
import torch

from dstrain.checkpoint import CheckpointStore, CorruptCheckpoint, load_tensors, tensor_names
from dstrain.checkpoint.files import seal
from dstrain.config.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int32, torch.int64]


def every_kind():
    """One tensor of each kind that a run state may hold, with values that a careless conversion would change."""
    torch.manual_seed(0)
    tensors = {f"float.{dtype}": torch.randn(3, 5, dtype=torch.float64).to(dtype) for dtype in FLOATS}
    tensors |= {f"int.{dtype}": torch.tensor([0, 1, torch.iinfo(dtype).max], dtype=dtype) for dtype in INTEGERS}
    tensors["float8"] = torch.randn(4).to(torch.float8_e4m3fn)
    tensors["bool"] = torch.tensor([True, False])
    tensors["scalar"] = torch.tensor(2.5)
    tensors["scalar64"] = torch.tensor(2**53 + 1)
    tensors["empty"] = torch.empty(0)
    tensors["empty.rows"] = torch.empty(0, 4, dtype=torch.bfloat16)
    tensors["special"] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    tensors["transposed"] = torch.randn(4, 6).t()
    tensors["slice"] = torch.randn(10)[2:5]
    return tensors


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def saved(root, tensors, meta=None, files=None, step=1):
    store = CheckpointStore(root, keep=2)
    store.save(step, tensors, meta or {}, files or {})
    assert store.wait() is None
    return store.newest()


def reseal(path):
    """Makes a tampered checkpoint's checksums right again, as whoever tampers would."""
    (path / "COMPLETE").unlink()
    (path / "checksums.json").unlink()
    seal(path)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    tensors = every_kind()
    path = saved(tmp_path, tensors)
    into = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    load_tensors(path, into)
    for name, tensor in tensors.items():
        assert bits(into[name]) == bits(tensor), name


def test_tensors_spread_over_several_files_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr("dstrain.checkpoint.tensors.FILE_BYTES", 64)
    tensors = every_kind()
    path = saved(tmp_path, tensors)
    assert len(list((path / "tensors").iterdir())) > 3
    into = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
    load_tensors(path, into)
    assert all(bits(into[name]) == bits(tensor) for name, tensor in tensors.items())


def test_loading_fills_strided_and_grad_requiring_tensors_in_place(tmp_path):
    value = torch.arange(6.0).view(2, 3)
    path = saved(tmp_path, {"weight": value, "view": value})
    weight, storage = torch.nn.Parameter(torch.zeros(2, 3)), torch.zeros(3, 4)
    address = weight.data_ptr()
    load_tensors(path, {"weight": weight, "view": storage.t()[:2]})
    assert torch.equal(weight, value) and weight.data_ptr() == address
    assert torch.equal(storage[:, :2], value.t()) and storage[:, 2:].eq(0).all()


def test_changes_right_after_save_do_not_reach_the_disk(tmp_path):
    """FAULTS C01: the optimizer steps while the checkpoint is written."""
    tensors = {"weight": torch.full((1 << 20,), 1.0), "bias": torch.tensor(1.0)}
    meta, files, alias = {"tokens": 1}, {"a.txt": b"1"}, {"tied": tensors["weight"]}
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, tensors | alias, meta, files)
    tensors["weight"].fill_(2.0)
    tensors["bias"].fill_(2.0)
    meta["tokens"] = 2
    files["a.txt"] = b"2"
    assert store.wait() is None
    into = {"weight": torch.zeros(1 << 20), "bias": torch.tensor(0.0), "tied": torch.zeros(1 << 20)}
    load_tensors(store.newest(), into)
    assert all(tensor.eq(1.0).all() for tensor in into.values())
    assert store.meta(store.newest()) == {"tokens": 1} and store.file(store.newest(), "a.txt") == b"1"


def test_names_shapes_and_dtypes_are_known_without_the_data(tmp_path):
    tensors = every_kind()
    path = saved(tmp_path, tensors)
    assert tensor_names(path) == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert tensor_names(saved(tmp_path / "none", {})) == {}


def test_meta_and_files_come_back(tmp_path):
    meta = {"step": 2**60, "rng": [1, 2, 3], "loss": 0.1, "text": "ü\n", "none": None}
    files = {"tokenizer.json": bytes(range(256)), "empty": b""}
    path = saved(tmp_path, {}, meta, files)
    assert CheckpointStore.meta(path) == meta
    assert all(CheckpointStore.file(path, name) == data for name, data in files.items())
    with pytest.raises(InputError, match=r"no file 'tokeniser.json' \(did you mean 'tokenizer.json'\?\)"):
        CheckpointStore.file(path, "tokeniser.json")


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".."])
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not a plain file name"):
        CheckpointStore(tmp_path, keep=2).save(1, {}, {}, {name: b""})


@pytest.mark.parametrize(
    "into, words",
    [
        ({"a": (2, 3)}, ["1 tensor unknown here (b)"]),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, ["1 tensor missing there (c)"]),
        ({"a": (3, 2), "b": (4,)}, ["1 tensor of another shape", "a: float32[2, 3] there, float32[3, 2] here"]),
        ({f"x{i}": (1,) for i in range(5)}, ["5 tensors missing there (x0, x1, x2, and 2 more)", "2 tensors unknown"]),
    ],
)
def test_another_models_checkpoint_is_an_error_that_names_source_and_keys(tmp_path, into, words):
    """FAULTS C05. Nothing may be loaded then, not even what fits."""
    path = saved(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4)})
    tensors = {name: torch.zeros(shape) for name, shape in into.items()}
    with pytest.raises(InputError) as error:
        load_tensors(path, tensors)
    line = str(error.value)
    assert str(path) in line and "\n" not in line and all(word in line for word in words)
    assert all(tensor.eq(0).all() for tensor in tensors.values())


def test_another_dtype_is_an_error_and_not_a_conversion(tmp_path):
    """FAULTS A05: a float32 routing bias must not pass through bfloat16 unseen."""
    path = saved(tmp_path, {"bias": torch.ones(2)})
    with pytest.raises(InputError, match=r"bias: float32\[2\] there, bfloat16\[2\] here"):
        load_tensors(path, {"bias": torch.zeros(2, dtype=torch.bfloat16)})


def test_prefixes_choose_a_part_and_the_part_is_still_strict(tmp_path):
    path = saved(tmp_path, {"model.a": torch.ones(1), "model.b": torch.ones(1), "adam.a": torch.ones(1)})
    into = {"model.a": torch.zeros(1), "model.b": torch.zeros(1)}
    load_tensors(path, into, prefixes=["model."])
    assert into["model.a"] == into["model.b"] == 1
    with pytest.raises(InputError, match=r"1 tensor unknown here \(model.b\)"):
        load_tensors(path, {"model.a": torch.zeros(1)}, prefixes=["model."])
    with pytest.raises(InputError, match=r"1 tensor unknown here \(adam.a\)"):
        load_tensors(path, into)


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path):
    """FAULTS C05: a nonexistent step, or a folder without a marker."""
    path = saved(tmp_path, {"a": torch.ones(1)})
    for read in (tensor_names, CheckpointStore.meta, CheckpointStore.verify):
        with pytest.raises(InputError, match="no complete checkpoint at .*step-00000099"):
            read(tmp_path / "step-00000099")
    (path / "COMPLETE").unlink()
    with pytest.raises(InputError, match="no complete checkpoint"):
        load_tensors(path, {"a": torch.zeros(1)})


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (open, (str(self.target), "w"))


def test_a_pickle_in_the_place_of_any_file_is_never_executed(tmp_path):
    """DCP's default reader unpickles `.metadata`; torch.load unpickles anything. Neither may happen here."""
    target = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(target))
    pickle.loads(bomb)
    assert target.exists()  # the bomb works
    target.unlink()

    tensors = {"a": torch.ones(3)}
    path = saved(tmp_path / "run", tensors, {"tokens": 1})
    (path / "tensors" / ".metadata").write_bytes(bomb)
    reseal(path)
    CheckpointStore.verify(path)
    into = {"a": torch.zeros(3)}
    load_tensors(path, into)
    assert into["a"].eq(1).all() and not target.exists()

    for victim in [next((path / "tensors").glob("*.safetensors")), path / "meta.json"]:
        victim.write_bytes(bomb)
    reseal(path)
    with pytest.raises(CorruptCheckpoint, match="tensors"):
        load_tensors(path, into)
    with pytest.raises(CorruptCheckpoint, match="meta.json"):
        CheckpointStore.meta(path)
    (path / "checksums.json").write_bytes(bomb)
    with pytest.raises(CorruptCheckpoint, match="checksums.json"):
        CheckpointStore.verify(path)
    assert not target.exists()


def test_pieces_that_leave_a_hole_are_an_error(tmp_path):
    """A hole would leave the numbers that were in memory before. Here: offset 9 and length 4 leave 0…8 uncovered."""
    path = saved(tmp_path, {"a": torch.ones(4)})
    file = next((path / "tensors").iterdir())
    raw = file.read_bytes()
    changed = raw.replace(b'saved_offsets\\": [0]', b'saved_offsets\\": [9]')
    assert changed != raw and len(changed) == len(raw)
    file.write_bytes(changed)
    reseal(path)
    with pytest.raises(CorruptCheckpoint, match="the pieces of a do not cover it"):
        load_tensors(path, {"a": torch.zeros(13)})


def test_a_disk_that_fails_under_a_load_is_one_line(tmp_path, monkeypatch):
    """DCP raises a BaseException with a traceback for its text."""
    path = saved(tmp_path, {"a": torch.ones(4)})

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("torch.distributed.checkpoint.hf_storage.HuggingFaceStorageReader.read_data", fail)
    with pytest.raises(CorruptCheckpoint, match="Input/output error") as error:
        load_tensors(path, {"a": torch.zeros(4)})
    assert "\n" not in str(error.value)


def test_meta_that_json_cannot_hold_is_the_callers_error(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(TypeError):
        store.save(1, {}, {"step": torch.tensor(1)}, {})
    assert store.wait() is None and list(tmp_path.iterdir()) == []
