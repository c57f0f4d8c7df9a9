"""What tools/storm.py holds against a run: it reads a run folder's files itself, with nothing of dstrain.

A checkpoint is intact where `COMPLETE` holds the BLAKE2b-256 of `checksums.json`, and every file that it lists has its
size and digest (dstrain/checkpoint/files.py says so).
"""

import hashlib
import json
import re
import struct
from pathlib import Path

STEP = re.compile(r"step-(\d{8})")
TIMES = ("step_time", "tokens_per_second", "mfu", "step_time_spread", "slowest_rank")  # of metrics, differ in every run


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of those with a marker, newest first."""
    root = run / "checkpoints"
    named = [(STEP.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted(((int(m[1]), path) for m, path in named if m and (path / "COMPLETE").exists()), reverse=True)


def intact(folder: Path) -> bool:
    try:
        listing = (folder / "checksums.json").read_bytes()
        if (folder / "COMPLETE").read_bytes().strip() != _digest(listing).encode():
            return False
        for name, entry in json.loads(listing)["files"].items():
            data = (folder / name).read_bytes()
            if len(data) != entry["size"] or _digest(data) != entry["blake2b"]:
                return False
    except OSError:
        return False
    return True


def newest_intact(run: Path) -> int:
    """The step that a restart has to continue from; 0: from the beginning."""
    return next((step for step, path in checkpoints(run) if intact(path)), 0)


def saving(run: Path) -> bool:
    """Whether a save is under way (or was when its process died)."""
    root = run / "checkpoints"
    return root.is_dir() and any(path.name.startswith(".tmp-") for path in root.iterdir())


def rows(run: Path) -> list[dict]:
    """Lines of metrics.jsonl, but a torn last one."""
    found = []
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def last_step(run: Path) -> int:
    try:
        return rows(run)[-1]["step"]
    except (OSError, IndexError):
        return 0


def status(run: Path) -> dict:
    try:
        return json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def leftovers(run: Path, damaged: int) -> list[str]:
    """What a finished run must not have: anything half, or set aside that was never damaged."""
    found = [f"{path.name} is left" for path in run.iterdir() if path.name.endswith((".part", ".tmp"))]
    aside = 0
    for path in (run / "checkpoints").iterdir():
        if ".corrupt" in path.name:
            aside += 1
        elif not STEP.fullmatch(path.name):
            found.append(f"checkpoints/{path.name} is left")
        elif not intact(path):
            found.append(f"checkpoints/{path.name} is not intact")
    if aside != damaged:
        found.append(f"{aside} checkpoints are set aside, {damaged} were damaged")
    return found


def tensors(folder: Path) -> dict[str, bytes]:
    """'file: name' -> dtype, shape and bytes, of every tensor in a checkpoint's safetensors files."""
    found = {}
    for path in sorted((folder / "tensors").iterdir()):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[f"{path.name}: {name}"] = f"{entry['dtype']} {entry['shape']} ".encode() + data[begin:end]
    return found


def differences(run: Path, reference: Path) -> tuple[list[str], dict[str, int]]:
    """Between a run and one that was never disturbed. -> what differs, and how many numbers were compared, by kind."""
    (step, ours), (there, theirs) = checkpoints(run)[0], checkpoints(reference)[0]
    if step != there:
        return [f"the last step is {step}, not {there}"], {}
    mine, right = tensors(ours), tensors(theirs)
    found = [f"{name} is on one side alone" for name in sorted(mine.keys() ^ right.keys())]
    found += [f"{name} differs" for name in sorted(mine.keys() & right.keys()) if mine[name] != right[name]]
    states = [json.loads((path / "meta.json").read_text())["state"] for path in (ours, theirs)]
    found += [f"state.{key} differs" for key in states[1] if states[0].get(key) != states[1][key]]
    lines = [[{k: v for k, v in row.items() if k not in TIMES} for row in rows(path)] for path in (run, reference)]
    if [row["step"] for row in lines[0]] != list(range(1, step + 1)):
        found.append(f"metrics.jsonl has not each of the steps 1 to {step} once")
    found += [f"metrics of step {right['step']} differ" for row, right in zip(*lines) if row != right]
    return found, counts(right)


def counts(of: dict[str, bytes]) -> dict[str, int]:
    kinds = {"weights": 0, "masters": 0, "averages": 0, "moments": 0, "biases": 0, "generators": 0}
    for key in of:
        name = key.split(": ")[1]
        if name.startswith("rng."):
            kinds["generators"] += 1
        elif name.startswith("optimizer.master."):
            kinds["masters"] += 1
        elif name.startswith("ema."):
            kinds["averages"] += 1
        elif name.startswith("optimizer."):
            kinds["moments"] += 1
        elif name.endswith("e_score_correction_bias"):
            kinds["biases"] += 1
        else:
            kinds["weights"] += 1
    return kinds


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()
