"""From what a user names, a run folder or a checkpoint folder, to one intact checkpoint."""

from collections.abc import Callable
from pathlib import Path

from dstrain.checkpoint.files import CorruptCheckpoint, require_complete
from dstrain.checkpoint.store import CheckpointStore
from dstrain.config.errors import InputError


def find_checkpoint(
    where: str, report: Callable[[str], None], key: str = "checkpoint", verified: bool = True
) -> Path:
    """The newest intact checkpoint of a run folder, or the checkpoint folder itself once it is verified.

    key: the configuration key that `where` comes from, for the error. verified=False: without reading it through, to
    look at its small files. Raises InputError where there is none.
    """
    path = Path(where)
    if not path.is_dir():
        valid = "a run folder such as runs/NAME, or one of its checkpoints"
        raise InputError(f"{key}={where}: no such folder; valid: {valid}")
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    store = CheckpointStore(root, keep=2)
    steps = [root / f"step-{step:08}" for step in store.steps()]
    if not verified:
        candidate = steps[0] if steps else path
        require_complete(candidate)
        return candidate
    for candidate in steps:
        try:
            store.verify(candidate)
            return candidate
        except CorruptCheckpoint as error:
            report(f"CORRUPT {error}; falling back to the checkpoint before it")
    if steps:
        raise InputError(f"{key}={where}: none of its {len(steps)} checkpoints is intact")
    if root != path:
        raise InputError(f"{key}={where}: the run has no complete checkpoint yet")
    store.verify(path)
    return path
