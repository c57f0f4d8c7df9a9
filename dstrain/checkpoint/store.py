"""Saving, keeping and finding a run's checkpoints (DESIGN §6, run folder).

A checkpoint is a folder `step-XXXXXXXX`:

    tensors/*.safetensors   the tensors, see `tensors`
    files/*                 the caller's files as they are (a tokenizer, the resolved configuration)
    meta.json               the caller's integers, floats and texts
    checksums.json          size and digest of each of those
    COMPLETE                the marker, written last

A save copies the tensors, returns, and writes in a thread: a temporary folder, checksums, fsync, marker, one rename,
then the removal of checkpoints beyond `keep`. Whenever the process is killed, the newest complete checkpoint is whole.

Several ranks save into one folder of a file system that all of them see. Rank 0 makes the temporary folder; each rank
writes its own tensor files there; rank 0 waits for all (`parts`), adds the rest, and completes the checkpoint. A rank
that fails or dies fails the save of all, with one line from rank 0. The threads talk through files alone.
"""

import atexit
import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dstrain.checkpoint import folders, parts
from dstrain.checkpoint.files import MARKER, CorruptCheckpoint, require_complete, seal, verify, write_file
from dstrain.checkpoint.staging import Staging
from dstrain.checkpoint.tensors import Tensors, as_piece, write_tensors
from dstrain.config.errors import InputError, nearest
from dstrain.parallel.group import Group

META = "meta.json"
FILES = "files"
TIMEOUT = 1800.0  # seconds that anything here waits for a write


class CheckpointStore:
    """The checkpoints under `root`, of which the newest `keep` complete ones are kept.

    A save that fails does not stop the run: `failure` holds its line until a later save succeeds, and
    `on_failure(step, line)` is called, mostly from the writing thread; with several ranks on the first alone.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        on_failure: Callable[[int, str], None] = lambda step, line: None,
        ranks: Group | None = None,
        timeout: float = TIMEOUT,
    ):
        """ranks: those that save and resume together, a group that takes host objects (`Mesh.host_group`); None: one.

        timeout: seconds that a rank waits for another's part of a save.
        """
        self.root = Path(root)
        self.keep = keep
        self.on_failure = on_failure
        self.ranks = Group((0,), 0) if ranks is None else ranks
        self.timeout = timeout
        self.failure: str | None = None
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._step = -1

    # Saving: `save` and `wait` are called by all ranks at the same step

    def save(self, step: int, tensors: Tensors, meta: dict, files: dict[str, bytes], timeout: float = TIMEOUT) -> None:
        """Copies everything, returns, and writes checkpoint `step` in the background.

        tensors: any device, shape and dtype, what this rank contributes; they may change as soon as this returns. meta:
        comes back as JSON makes it (tuples as lists). files: plain name -> bytes. The first rank's meta and files
        count. A checkpoint of the same step is replaced. An earlier save is waited for, at most `timeout` seconds.
        Raises TypeError or ValueError for a meta or a name that cannot be saved.
        """
        meta_json = json.dumps(meta, indent=1).encode()
        for name in files:
            if name != Path(name).name or name in ("", ".."):
                raise ValueError(f"{name!r} is not a plain file name")
        late = self.join(timeout) if self.writing() else None
        problem = f"not started: {late}" if self.writing() else None
        nbytes = sum(as_piece(part).tensor.nbytes for part in tensors.values()) + 512 * len(tensors)  # and headers
        reports = self.ranks.gather_objects((problem, nbytes), f"the state of a save of step {step}")
        problem = next((problem for problem, _ in reports if problem), None)
        folder = None
        if problem is None and self.ranks.index == 0:
            need = sum(nbytes for _, nbytes in reports) + sum(map(len, files.values())) + len(meta_json) + 2**20
            try:
                folder = self._open(step, need)
            except (OSError, InputError) as error:
                problem = str(error)
        folder, problem = self.ranks.first_object((folder, problem), f"the folder of a save of step {step}")
        if folder is None:
            return self._failed(step, problem)
        arguments = step, folder, self._staging.copy(tensors), meta_json, dict(files)
        # A daemon, so that a disk that hangs cannot keep the process; the exit hook gives a good disk its time.
        self._step = step
        target = self._write if self.ranks.index == 0 else self._write_part
        self._thread = threading.Thread(target=target, args=arguments, name=f"checkpoint-{step}", daemon=True)
        atexit.register(self.join)
        self._thread.start()

    def wait(self, timeout: float = TIMEOUT) -> str | None:
        """Blocks until the last save is durable or has failed; returns its failure's line, or None, on every rank.

        After `timeout` seconds it gives up and returns a line that says so; the writing goes on.
        """
        line = self.join(timeout)
        if self.ranks.size > 1:
            lines = self.ranks.gather_objects(line, "the outcome of a save")
            line = lines[0] or next(filter(None, lines), None)
            if not self.writing():
                self.failure = line
        return line

    def join(self, timeout: float = TIMEOUT) -> str | None:
        """As `wait`, for this rank alone: the others may be gone. Returns what this rank knows."""
        if self._thread is not None:
            self._thread.join(min(timeout, 2.0))
            if self._thread.is_alive():
                if self.ranks.index == 0:
                    print(f"waiting for the checkpoint of step {self._step} to be written …", file=sys.stderr)
                self._thread.join(max(timeout - 2.0, 0.0))
            if self._thread.is_alive():
                return f"checkpoint of step {self._step} in {self.root} was not written after {timeout:g} s"
            self._thread = None
            atexit.unregister(self.join)
        return self.failure

    def leave(self, timeout: float) -> None:
        """As `join` where other ranks are gone: their parts may never come, so the process's end waits no longer."""
        self.join(timeout)
        atexit.unregister(self.join)

    def check_space(self, nbytes: int) -> None:
        """Raises InputError where the disk of `root` has less than `nbytes` bytes free."""
        where = self.root.absolute()
        while not where.exists():
            where = where.parent
        if not where.is_dir():
            raise InputError(f"checkpoints cannot go to {self.root}: {where} is a file, not a folder")
        free = shutil.disk_usage(where).free
        if free < nbytes:
            raise InputError(
                f"no disk space for a checkpoint in {self.root}: {nbytes:,} bytes needed, {free:,} bytes free"
            )

    def writing(self) -> bool:
        """Whether this rank is writing a save now."""
        return self._thread is not None and self._thread.is_alive()

    def _open(self, step: int, nbytes: int) -> Path:
        """The temporary folder of a save, made where there is space for it."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.check_space(nbytes)
        folder = folders.work_folder("tmp", self.root, step)
        try:
            parts.make(folder, self.ranks.size)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            folders.release(folder)
            raise
        return folder

    def _write(self, step: int, folder: Path, tensors: Tensors, meta_json: bytes, files: dict[str, bytes]) -> None:
        try:
            try:
                sums = write_tensors(folder, tensors)
                (folder / FILES).mkdir()
                for name, data in files.items():
                    write_file(folder / FILES / name, data)
                write_file(folder / META, meta_json)
                sums |= parts.collect(folder, range(1, self.ranks.size), self.timeout)
                seal(folder, known=sums)
                folders.publish(folder, self.root, step)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # there only after a failure
                folders.release(folder)
        except Exception as error:  # whatever it is, the run is worth more than this checkpoint
            return self._failed(step, f"{type(error).__name__}: {error}")
        self.failure = None
        self._retain(step)

    def _write_part(self, step: int, folder: Path, tensors: Tensors, meta_json: bytes, files: dict[str, bytes]) -> None:
        """What ranks other than the first do; they learn the outcome from it, in `wait`."""
        rank = self.ranks.index
        try:
            try:
                parts.report(folder, rank, write_tensors(folder, tensors, rank))
            except Exception as error:
                parts.report_failure(folder, rank, f"{type(error).__name__}: {error}", 2 * self.timeout)
                raise
            parts.wait_for_first(folder, 2 * self.timeout)  # the first may wait that long for another, and then writes
        except Exception as error:
            return self._failed(step, f"{type(error).__name__}: {error}")
        self.failure = None

    def _retain(self, saved: int) -> None:
        for step, path in folders.complete(self.root)[self.keep:]:
            if step == saved:
                continue
            try:
                folders.discard(self.root, step)
            except OSError as error:
                self.on_failure(saved, f"checkpoint of step {saved} is saved, but {path} cannot be deleted: {error}")

    def _failed(self, step: int, why: str) -> None:
        self.failure = f"checkpoint of step {step} was not saved in {self.root}: {' '.join(why.split())}"
        if self.ranks.index == 0:
            self.on_failure(step, self.failure)

    # Finding

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        return [step for step, _ in folders.complete(self.root)]

    def newest(self) -> Path | None:
        """The newest complete checkpoint, unverified."""
        return next((path for _, path in folders.complete(self.root)), None)

    def open_newest(self, report: Callable[[str], None]) -> Path | None:
        """The newest complete checkpoint that passes `verify`; None where no save was ever completed.

        Clears what killed processes left. A corrupt checkpoint is reported in one line and renamed to `*.corrupt`, and
        the one before it is tried. Raises InputError when none is left: starting anew must be the user's decision.
        With several ranks the first one looks, and all get its answer.
        """
        path = self.ranks.together(lambda: self._open_newest(report) if self.ranks.index == 0 else None, "a checkpoint")
        return self.ranks.first_object(path, "the newest checkpoint")

    def _open_newest(self, report: Callable[[str], None]) -> Path | None:
        folders.clear(self.root, report)
        for path in folders.incomplete(self.root):
            report(f"{path} is ignored: it has no marker file, so its save was never completed")
        corrupt = []
        for _, path in folders.complete(self.root):
            try:
                verify(path)
                return path
            except InputError as error:
                if not (path / MARKER).exists():  # a run that is training there has just retired it
                    continue
                if not isinstance(error, CorruptCheckpoint):
                    raise
                corrupt.append(path)
                try:
                    done = f"renamed to {folders.put_aside(path).name}"
                except OSError as failure:
                    done = f"could not be renamed ({failure.strerror})"
                report(f"CORRUPT {error}; {done}, falling back to the checkpoint before it")
        corrupt = corrupt or folders.set_aside(self.root)
        if corrupt:
            raise InputError(
                f"no intact checkpoint in {self.root}: {len(corrupt)} corrupt, newest {corrupt[0].name}; "
                "restore one, or choose another run.name to start anew"
            )
        return None

    # Reading: of any checkpoint folder, so these need no store

    verify = staticmethod(verify)

    @staticmethod
    def meta(path: Path) -> dict:
        """The `meta` that was saved."""
        require_complete(path)
        try:
            return json.loads((path / META).read_bytes())
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(f"checkpoint {path}: {META}: {error}") from error

    @staticmethod
    def file(path: Path, name: str) -> bytes:
        """The bytes of one of the `files` that were saved."""
        require_complete(path)
        present = [entry.name for entry in (path / FILES).iterdir()]
        if name not in present:
            raise InputError(f"checkpoint {path} has no file {name!r}{nearest(name, present)}")
        return (path / FILES / name).read_bytes()

    @staticmethod
    def files(path: Path) -> dict[str, bytes]:
        """All the `files` that were saved."""
        require_complete(path)
        return {entry.name: entry.read_bytes() for entry in sorted((path / FILES).iterdir())}
