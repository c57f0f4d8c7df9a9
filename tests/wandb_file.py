"""What wandb has written into a run's .wandb file, read without wandb's own reader: it has none in Python any more.

The file is a log as LevelDB writes it, behind a header of 7 bytes (":W&B", magic number, version): blocks of 32 KiB, in
them chunks of (checksum uint32, length uint16, kind uint8, bytes); kind 1 is a whole record, 2, 3 and 4 are the first,
middle and last part of one. A record is a protocol buffer of wandb's `Record`.
"""

import json
import struct
from pathlib import Path

BLOCK = 32768


def records(path: Path) -> list:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for payload in _payloads(path.read_bytes()):
        record = Record()
        record.ParseFromString(payload)
        found.append(record)
    return found


def rows(path: Path) -> list[dict]:
    """The rows that were logged, in order, without wandb's own keys."""
    return [_items(record.history.item) for record in records(path) if record.WhichOneof("record_type") == "history"]


def run_of(path: Path):
    """The record of the run itself, with its config as a dict."""
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    return run, _items(run.config.update)


def _items(items) -> dict:
    """Of (key, or the keys of nested dicts; value as JSON)."""
    found: dict = {}
    for item in items:
        *groups, name = list(item.nested_key) or [item.key]
        here = found
        for group in groups:
            here = here.setdefault(group, {})
        here[name] = json.loads(item.value_json)
    return {key: value for key, value in found.items() if not key.startswith("_")}


def _payloads(data: bytes):
    assert data[:4] == b":W&B", "no .wandb file"
    at, parts = 7, []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little for a header: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind in (1, 2, 3, 4), f"kind {kind} at {at}"
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
