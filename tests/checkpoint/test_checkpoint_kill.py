"""A process that dies while it saves leaves its newest complete checkpoint whole (FAULTS C01)."""

import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest
import torch

from dstrain.checkpoint import CheckpointStore, load_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# One server imports torch; the children are forked from it and start at once.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["dstrain.checkpoint.store"])


def state(step):
    """Tensors that are a function of the step, so that a reader knows what must be in them."""
    generator = torch.Generator().manual_seed(step)
    return {f"w{i}": torch.randn(50_000, generator=generator) for i in range(4)} | {"step": torch.tensor(step)}


def save_forever(root, first):
    store = CheckpointStore(root, keep=2)
    store.open_newest(lambda line: None)
    for step in range(first, first + 10**6):
        store.save(step, state(step), {"step": step}, {"name": b"x" * 1000})


def assert_newest_is_whole(root, at_least):
    """The newest complete checkpoint as a restarted run finds it; nothing may need a fall back. Returns its step."""
    store = CheckpointStore(root, keep=2)
    told = []
    path = store.open_newest(told.append)
    assert path == store.newest() and told == []
    for step in store.steps():
        store.verify(root / f"step-{step:08d}")
    step = store.meta(path)["step"]
    wanted = state(step)
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    load_tensors(path, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in wanted.items())
    assert path.name == f"step-{step:08d}" and step >= at_least
    assert not [name for name in os.listdir(root) if not name.startswith("step-")]  # leftovers of the dead are gone
    return step


def test_kill_at_random_moments_of_a_saving_loop(tmp_path):
    random.seed(0)
    newest = 0
    for _ in range(8):
        process = context.Process(target=save_forever, args=(tmp_path, newest + 1))
        process.start()
        deadline = time.monotonic() + 60
        while CheckpointStore(tmp_path, 2).steps()[:1] <= [newest]:
            assert process.is_alive() and time.monotonic() < deadline, "no checkpoint within 60 s"
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        newest = assert_newest_is_whole(tmp_path, at_least=newest + 1)


def save_and_die(root, step, calls, done):
    """Saves `step`, and dies at the `calls`-th call that touches the folder tree."""
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == calls:
                os._exit(9)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    store = CheckpointStore(root, keep=2)
    store.save(step, state(step), {"step": step}, {"name": b"x"})
    if store.wait() is None:
        done.set()


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "replaced step"])
def test_death_at_every_single_step_of_a_save(tmp_path, step):
    """Walks through all calls of one save: after each death there is a whole newest checkpoint, step 2 or later."""
    before = tmp_path / "before"
    store = CheckpointStore(before, keep=2)
    for saved in (1, 2):
        store.save(saved, state(saved), {"step": saved}, {})
    assert store.wait() is None
    done, calls, after = context.Event(), 0, set()
    while not done.is_set():
        calls += 1
        root = tmp_path / "run"
        shutil.copytree(before, root)
        process = context.Process(target=save_and_die, args=(root, step, calls, done))
        process.start()
        process.join(60)
        assert process.exitcode == (0 if done.is_set() else 9), "the save itself failed"
        after.add(assert_newest_is_whole(root, at_least=2))
        shutil.rmtree(root)
    assert calls > 15 and after == {2, step}
