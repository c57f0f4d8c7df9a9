"""A run folder as the report needs it: metrics.jsonl, eval.jsonl, config.yaml and status.json, in bounded memory.

Nothing in a run folder is taken for granted: a run may be going on, have been killed in the middle of a line, be of an
older version without some keys, or hold steps whose loss is null. What cannot be read is counted and left out.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from dstrain.config.errors import InputError
from dstrain.telemetry.report_bins import Bins, LoadBins

POINTS = 512  # bins of a curve
EVALUATIONS = 512  # records of eval.jsonl that are kept, besides those of the whole held-out text
RECENT = 50  # applied steps over which the last loss is averaged
FIRST_SKIPPED = 50  # skipped steps that are named one by one
NAMES = 32  # of sources or tasks that have a curve
LONGEST_LINE = 1 << 26  # bytes; a longer one is no step

SCALARS = (
    "loss", "loss_main", "loss_balance", "lr", "grad_norm", "step_time", "tokens_per_second", "mfu",
    "moe_max_violation", "bias_speed", "mtp_weight", "batch_sequences", "step_time_spread", "dispatch_slow_bytes",
    "dispatch_fast_bytes",
)
MAPPINGS = ("data_shares", "data_task_shares", "data_epochs")
# As JsonLines writes it. Cutting it out is a hundred times faster than reading it.
LOAD_BEGIN, LOAD_END = b'"moe_load": [[', b"]]"


@dataclass
class Run:
    """What is known of a run. Series have the names of metrics.jsonl, their parts loss_mtp.0 or data_shares.web."""

    path: Path
    name: str
    config: dict = field(default_factory=dict)
    status: dict = field(default_factory=dict)
    bins: Bins = field(default_factory=lambda: Bins(POINTS))
    load: LoadBins = field(default_factory=LoadBins)
    evaluations: list[dict] = field(default_factory=list)
    steps: int = 0  # lines read
    tokens: int = 0
    seconds: float = 0.0  # of all steps read
    recent: deque = field(default_factory=lambda: deque(maxlen=RECENT))  # loss_main of the last applied steps
    skipped: int = 0
    first_skipped: list[tuple[int, str]] = field(default_factory=list)  # step, why
    rollbacks: int = 0  # times that tokens went back
    slowest: Counter = field(default_factory=Counter)  # rank -> steps
    unreadable: list[str] = field(default_factory=list)  # what was left out, in words

    def setting(self, *keys: str) -> object:
        """A value of config.yaml, None where there is none."""
        value = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(path: Path, show: Callable[[int, int], None] = lambda done, total: None) -> Run:
    """Everything in `path`. show(bytes read, bytes in all) is called at each line. InputError for what is no run."""
    metrics = path / "metrics.jsonl"
    try:
        if not path.is_dir() or not (metrics.is_file() or (path / "config.yaml").is_file()):
            near = Path("runs") / path
            hint = f" (did you mean {near}?)" if not path.is_absolute() and (near / "config.yaml").is_file() else ""
            what = "holds neither metrics.jsonl nor config.yaml" if path.is_dir() else "is not a folder"
            raise InputError(f"run={path}: {what}{hint}; valid: the folder of a run, as in run=runs/tiny")
        run = Run(path, path.resolve().name)
        run.config = _mapping(run, "config.yaml", yaml.safe_load)
        run.status = _mapping(run, "status.json", json.loads)
        for row in _rows(run, metrics, show, run.load.wants):
            _add(run, row)
        for record in _rows(run, path / "eval.jsonl"):
            run.evaluations.append(_evaluation(record))
    except OSError as error:
        raise InputError(f"run={path}: {error.filename or path} cannot be read: {error.strerror}") from None
    run.evaluations = _thinned(run.evaluations)
    return run


def _mapping(run: Run, name: str, parse: Callable[[str], object]) -> dict:
    path = run.path / name
    if not path.is_file():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        run.unreadable.append(name)
        return {}
    return found


def _rows(
    run: Run,
    path: Path,
    show: Callable[[int, int], None] = lambda done, total: None,
    wants_load: Callable[[], bool] = lambda: True,
) -> Iterator[dict]:
    """The objects in `path` that have a step."""
    if not path.is_file():
        return
    bad = done = 0
    total = path.stat().st_size
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            done += len(line)
            show(done, max(total, done))
            ends = line.endswith(b"\n")
            begin = -1 if wants_load() else line.find(LOAD_BEGIN)
            end = line.find(LOAD_END, begin) if begin >= 0 else -1
            if end >= 0:
                line = line[:begin] + b'"moe_load": null' + line[end + len(LOAD_END) :]
            row = _object(line)
            if row is not None:
                yield row
            elif ends or len(line) == LONGEST_LINE:  # the last line of a run that goes on may be half written
                bad += bool(line.strip())
    if bad:
        run.unreadable.append(f"{bad} {'line' if bad == 1 else 'lines'} of {path.name}")


def _object(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool)
    return row if known else None


def _add(run: Run, row: dict) -> None:
    """One step of metrics.jsonl."""
    step, tokens = row["step"], number(row.get("tokens"))
    tokens = run.tokens if tokens is None else int(tokens)
    run.rollbacks += tokens < run.tokens
    run.steps, run.tokens = run.steps + 1, tokens
    numbers = {key: row.get(key) for key in SCALARS}
    if row.get("moe_load") == []:  # a model without experts: 0, always
        del numbers["moe_max_violation"], numbers["loss_balance"]
    if isinstance(mtp := row.get("loss_mtp"), list):
        numbers |= {f"loss_mtp.{depth}": loss for depth, loss in enumerate(mtp[:NAMES])}
    for key in MAPPINGS:
        if isinstance(parts := row.get(key), dict):
            numbers |= {f"{key}.{name}": part for name, part in list(parts.items())[:NAMES]}
    numbers = {key: value for key, item in numbers.items() if (value := number(item)) is not None}
    skipped, spike = row.get("skipped") is True, row.get("spike") is True
    numbers["skipped"] = float(skipped)
    if skipped:
        run.skipped += 1
        if len(run.first_skipped) < FIRST_SKIPPED:
            run.first_skipped.append((step, "spike of the loss" if spike else "non-finite loss or gradient"))
    elif "loss_main" in numbers:
        run.recent.append(numbers["loss_main"])
    run.seconds += numbers.get("step_time", 0.0)
    rank = row.get("slowest_rank")
    names = {"slowest_rank": rank} if isinstance(rank, int) and not isinstance(rank, bool) else {}
    run.slowest.update(names.values())
    run.bins.add(step, tokens, numbers, names)
    run.load.add(step, tokens, row.get("moe_load"))


def _evaluation(record: dict) -> dict:
    """A record of eval.jsonl with the keys that the report shows: numbers, None where there is none."""
    keys = ("tokens", "loss", "accuracy", "bits_per_byte", "heldout_tokens")
    lists = {key: found if isinstance(found := record.get(key), list) else [] for key in ("loss_mtp", "accuracy_mtp")}
    return {
        "step": record["step"], **{key: number(record.get(key)) for key in keys},
        **{key: [number(value) for value in values[:NAMES]] for key, values in lists.items()},
        "whole": record.get("whole") is True,
    }


def _thinned(records: list[dict]) -> list[dict]:
    """All of the whole held-out text, and evenly spaced ones of the others."""
    parts = [i for i, record in enumerate(records) if not record["whole"]]
    kept = set(parts[:: -(-len(parts) // EVALUATIONS)] if parts else [])
    return [record for i, record in enumerate(records) if record["whole"] or i in kept]


def number(value: object) -> float | None:
    """A finite number as it is, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None
