"""`dstrain prepare`: every kind of source into token files, the same whatever the workers and interruptions."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import megatron_format
from dstrain.cli import main
from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.data import prepare as module
from dstrain.data import shards
from dstrain.data.documents import _hub, row_of
from dstrain.data.indexed import IndexedDataset
from dstrain.data.prepare import prepare
from dstrain.data.tokenizer import BOS, EOS, Tokenizer

# Documents with what breaks readers: two bytes, several bytes, a line end inside, the spelling of an end mark.
TEXTS = ["a", "b", "né 🎉\n\nend", f"say {EOS} and {BOS}<eos>", "x " * 500]


class HereExecutor:
    """Runs what is submitted at once, in this process."""

    submitted: list[int] = []

    def __init__(self, workers, context, start, arguments):
        shards._tokenizer = Tokenizer.load(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def shutdown(self, wait, cancel_futures):
        pass

    def submit(self, function, *arguments):
        HereExecutor.submitted.append(int(arguments[0].name.removeprefix("shard-")))
        future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(module, "ProcessPoolExecutor", HereExecutor)
    HereExecutor.submitted = []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(["né 🎉 end say x a b\n"] * 3, 300).save(path)
    return str(path)


def config(source, out, tokenizer, *more):
    return compose("prepare", [f"from={source}", f"out={out}", f"tokenizer={tokenizer}", *more])[0]


def write_jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_parquet(path, texts, rows=2, kind=None):
    table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, kind or pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return path


def expected(texts, tokenizer):
    """The right ids: those of the library itself with special tokens switched off, between the two marks."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(tokenizer)
    library.encode_special_tokens = True
    bos, eos = library.token_to_id(BOS), library.token_to_id(EOS)
    return [[bos, *library.encode(text, add_special_tokens=False).ids, eos] for text in texts]


def make_source(kind, folder):
    folder.mkdir()
    half = len(TEXTS) // 2
    if kind == "jsonl":
        write_jsonl(folder / "a.jsonl", TEXTS[:half])
        (folder / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + write_jsonl(folder / "b.jsonl", TEXTS[half:]).read_bytes())
    elif kind == "jsonl.gz":
        data = write_jsonl(folder / "a.jsonl", TEXTS).read_bytes()
        (folder / "a.jsonl").unlink()
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(data[:40]) + gzip.compress(data[40:]))
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", TEXTS[:half])
        write_parquet(folder / "b.parquet", TEXTS[half:], kind=pyarrow.large_string())
    else:
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "text"])
def test_every_source_gives_its_documents_to_an_independent_reader(tmp_path, tokenizer, here, capsys, kind):
    """D05: exact ids, one begin and one end, no mark for a text that spells one. Few documents a shard, so that files
    are joined; the summary's numbers are counted here."""
    out = tmp_path / "tokens" / "t"
    assert prepare(config(make_source(kind, tmp_path / "in"), out, tokenizer, "shard_size=2B")) == 0
    documents, code = megatron_format.read(out)
    right = expected(TEXTS, tokenizer)
    assert documents == right and code == 4 and IndexedDataset(out).num_tokens == sum(map(len, right))
    known = json.loads((tmp_path / "tokens/t.json").read_text())
    tokens, size = sum(map(len, right)), sum(len(text.encode()) for text in TEXTS)
    assert [known[key] for key in ("documents", "tokens", "bytes", "longest", "empty", "not_utf8")] == [
        5, tokens, size, max(map(len, right)), 0, 0,
    ]
    printed = capsys.readouterr().out
    assert f"bytes per token  {size / tokens:.3f}" in printed and f"tokens           {tokens:,}" in printed
    assert sorted(path.name for path in out.parent.iterdir()) == ["t.bin", "t.idx", "t.json"]
    assert len(HereExecutor.submitted) >= 3


def test_a_hub_data_set_streams(tmp_path, tokenizer):
    """The same load_dataset by name, of a folder that looks like a Hub repository: no network here."""
    for split, texts in (("train", TEXTS), ("validation", ["v"])):
        write_parquet(tmp_path / f"{split}-0.parquet", texts)
    for split, texts in (("train", TEXTS), ("validation", ["v"])):
        source = _hub(config(tmp_path, "o", tokenizer, f"split={split}"))
        rows = [row_of(record, "text", n) for n, record in enumerate(source.rows, 1)]
        assert [text for text, _, _ in rows] == [text.encode() for text in texts]
        assert rows[0][1:] == ("row 1", 1)
    with pytest.raises(InputError, match="split=nope: .*train"):
        _hub(config(tmp_path, "o", tokenizer, "split=nope"))
    with pytest.raises(InputError, match="no column=body; there are id, text"):
        _hub(config(tmp_path, "o", tokenizer, "column=body"))
    with pytest.raises(InputError, match="column=id holds .*int64.*text is needed"):
        _hub(config(tmp_path, "o", tokenizer, "column=id"))


def test_a_hub_name_without_network_is_one_line(tmp_path, tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="from=some/corpus: no such file or .* here, and the Hub cannot be reached"):
        prepare(config("some/corpus", "o", tokenizer))
    assert not list(tmp_path.iterdir())


def test_names_of_files_may_be_patterns_or_no_text_at_all(tmp_path, tokenizer, here, capsys):
    (tmp_path / "in").mkdir()
    for name, content in ((b"a[1]*.txt", b"one"), (b"b\xff.txt", b"two"), (b"c\xfe.txt", b"\xff")):
        with open(os.fsencode(tmp_path / "in") + b"/" + name, "wb") as file:
            file.write(content)
    write_parquet(tmp_path / "p", ["three"]).rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet"))
    prepare(config(tmp_path / "in", tmp_path / "t", tokenizer))
    assert megatron_format.read(tmp_path / "t")[0] == expected(["one", "two"], tokenizer)
    assert "in/c\ufffd.txt: not UTF-8" in capsys.readouterr().out
    prepare(config(tmp_path, tmp_path / "u", tokenizer, "pattern=*.parquet"))
    assert megatron_format.read(tmp_path / "u")[0] == expected(["three"], tokenizer)


@pytest.mark.parametrize(
    "unit, right", [("file", ["one\r\ntwo\n\n\nthree\n \nfour"]), ("line", ["one", "two", "three", "four"]),
                    ("paragraph", ["one\r\ntwo", "three", "four"])]
)  # fmt: skip
def test_units_of_plain_text(tmp_path, tokenizer, here, unit, right):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n\nthree\n \nfour")
    prepare(config(tmp_path / "a.txt", tmp_path / "t", tokenizer, f"unit={unit}"))
    assert megatron_format.read(tmp_path / "t")[0] == expected(right, tokenizer)


BROKEN = ["good", "", " \n", "bad\udc80", None, "fine"]


def broken_source(kind, tmp_path):
    if kind == "jsonl":  # a raw byte, and an escape that spells half a character
        lines = [json.dumps({"text": text}).encode() for text in BROKEN]
        (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "caf\xe9"}', b""]))
        return tmp_path / "a.jsonl", 2, "a.jsonl:4: not UTF-8: byte 0xed at offset 3"
    if kind == "parquet":
        texts = [text.encode("utf-8", "surrogateescape") if text is not None else None for text in BROKEN]
        path = write_parquet(tmp_path / "a.parquet", texts, kind=pyarrow.binary())
        return path, 1, "a.parquet, row 2 of row group 1: not UTF-8: byte 0x80"
    for i, text in enumerate(BROKEN):
        (tmp_path / f"{i}.txt").write_bytes((text or "").encode("utf-8", "surrogateescape"))
    return tmp_path, 1, "3.txt: not UTF-8: byte 0x80 at offset 3"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_empty_documents_and_broken_utf8_are_left_out_counted_and_named(tmp_path, tokenizer, here, capsys, kind):
    source, count, first = broken_source(kind, tmp_path)
    prepare(config(source, tmp_path / "t", tokenizer))
    assert megatron_format.read(tmp_path / "t")[0] == expected(["good", "fine"], tokenizer)
    printed = capsys.readouterr().out
    assert "left out         3 empty documents" in printed
    assert f"left out         {count} documents that are not UTF-8, the first: " in printed and first in printed


def test_shards_of_an_interrupted_start_are_kept_and_the_rest_is_made(tmp_path, tokenizer, here, monkeypatch):
    """20 documents, one a shard; shard 7 fails after 0-6, then 9 and 10 are there too (of other workers): the second
    start makes 7, 8 and 11-19 only, and the files equal those of one start."""
    texts = [f"text {i} " * (i + 1) for i in range(20)]
    whole = config(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "whole", tokenizer, "shard_size=1B")
    prepare(whole)
    again = config(tmp_path / "a.jsonl", tmp_path / "again", tokenizer, "shard_size=1B")
    HereExecutor.submitted = []
    real = shards.encode_shard

    def failing(prefix, *arguments):
        if prefix.name.endswith("07"):
            raise KeyboardInterrupt
        return real(prefix, *arguments)

    monkeypatch.setattr(module, "encode_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(again)
    monkeypatch.setattr(module, "encode_shard", real)
    with pytest.raises(InputError, match="again.parts holds .* another column, shard_size"):
        prepare(config(tmp_path / "a.jsonl", tmp_path / "again", tokenizer, "column=id"))
    parts = tmp_path / "again.parts"
    cuts = module._cut(again, module.open_documents(again), shards.Cut(0, 0, {}))
    for number, (shard_texts, places, cut) in enumerate(cuts):
        if number in (9, 10):
            real(parts / f"shard-{number:06}", shard_texts, places, cut)
    HereExecutor.submitted = []
    prepare(again)
    assert HereExecutor.submitted == [7, 8, *range(11, 20)]
    for end in ("bin", "idx"):
        assert (tmp_path / f"again.{end}").read_bytes() == (tmp_path / f"whole.{end}").read_bytes()
    assert not parts.exists()
    HereExecutor.submitted = []
    prepare(again)
    assert not HereExecutor.submitted  # it is there already


def test_shards_grow_with_the_source_up_to_their_largest_size(tmp_path, tokenizer, monkeypatch):
    """By the definition: a shard ends when it holds 10 bytes, or half of what came before it, or 100 bytes. A start in
    the middle cuts the same."""
    monkeypatch.setattr(module, "FIRST_BYTES", 10)
    monkeypatch.setattr(module, "GROWTH", 2)
    write_jsonl(tmp_path / "a.jsonl", ["abc"] * 300)
    settings = config(tmp_path / "a.jsonl", "o", tokenizer, "shard_size=100B")
    cuts = list(module._cut(settings, module.open_documents(settings), shards.Cut(0, 0, {})))
    sizes, left = [], 300
    while left:
        before = 3 * (300 - left)
        wanted = -(-min(100, max(10, before // 2)) // 3)
        sizes.append(min(wanted, left))
        left -= sizes[-1]
    assert [len(texts) for texts, _, _ in cuts] == sizes and sizes[0] == 4 and max(sizes) == 34
    for k in (0, 3, 6):
        rest = module._cut(settings, module.open_documents(settings), cuts[k][2])
        assert [len(texts) for texts, _, _ in rest] == sizes[k + 1 :]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text", "hub"])
def test_reading_goes_on_after_any_document(tmp_path, tokenizer, kind):
    """The state goes through JSON, as it does in a shard's file; the right rows are those of an unbroken reading."""
    source = make_source("parquet" if kind == "hub" else kind, tmp_path / "in")
    settings = config(source, "o", tokenizer, "shard_size=1B")
    opened = _hub if kind == "hub" else module.open_documents
    cuts = list(module._cut(settings, opened(settings), shards.Cut(0, 0, {})))
    assert [text for texts, _, _ in cuts for text in texts] == [text.encode() for text in TEXTS]
    for k, (_, _, cut) in enumerate(cuts):
        rest = module._cut(settings, opened(settings), shards.Cut(**json.loads(json.dumps(vars(cut)))))
        assert [(texts, places, vars(c)["rows"]) for texts, places, c in rest] == [
            (texts, places, c.rows) for texts, places, c in cuts[k + 1 :]
        ]


def test_limit_takes_the_first_documents(tmp_path, tokenizer, here):
    prepare(config(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "t", tokenizer, "limit=3", "shard_size=1B"))
    assert megatron_format.read(tmp_path / "t")[0] == expected(TEXTS[:3], tokenizer)


def test_processes_killed_in_the_middle_lose_their_shards_alone(tmp_path, tokenizer):
    """Two workers, `kill -9` of the first process once three shards are there: its workers end by themselves, the same
    command finishes with the shards it found, and the result is that of one process."""
    texts = [f"word{i} " * 4000 for i in range(60)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    command = [sys.executable, "-m", "dstrain", "prepare", f"from={source}", f"tokenizer={tokenizer}"]
    command += [f"out={tmp_path / 't'}", "workers=2", "shard_size=30KB"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    parts, deadline = tmp_path / "t.parts", time.monotonic() + 120
    while len(list(parts.glob("shard-*.json"))) < 3 and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    first.send_signal(signal.SIGKILL)
    first.wait(60)
    assert len(workers) >= 2
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    kept = len(list(parts.glob("shard-*.json")))
    assert 3 <= kept < 60
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "finished shards found, going on after document" in done.stderr and "tokens/s" in done.stderr
    assert megatron_format.read(tmp_path / "t")[0] == expected(texts, tokenizer)


def test_progress_says_share_speed_and_time_left(monkeypatch):
    """At 100 s: 30 of 120 done, 10 of them by an earlier start, so 20 in 100 s and 450 s to go; 1000 tokens."""
    from rich.console import Console

    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    meter = module.Meter(Console(quiet=True), 120)
    meter.earlier(shards.Counts(documents=5), shards.Cut(5, 10, {}))
    clock[0] = 100.0
    meter.now(shards.Counts(documents=7, tokens=1000, bytes=2_000_000), shards.Cut(12, 20, {}))
    assert meter.line() == " 25%, 12 documents, 0.0 MB/s, 10 tokens/s, 0:07:30 left"
    meter.total = None
    assert meter.line() == "12 documents, 0.0 MB/s, 10 tokens/s"


def bad(tmp_path):
    write_jsonl(tmp_path / "ok.jsonl", ["a"])
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "number.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "no.parquet").write_text("hello")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-10])
    write_parquet(tmp_path / "ok.parquet", ["a"])
    return {
        ("from=missing.jsonl",): "from=missing.jsonl: no such file or folder",
        ("from=ok.jsonl", "column=body"): "ok.jsonl:1: no column=body; there are id, text",
        ("from=ok.jsonl", "column=id"): "ok.jsonl:1: column=id holds int, text is needed",
        ("from=ok.parquet", "column=body"): "ok.parquet: no column=body; there are id, text",
        ("from=ok.parquet", "column=id"): "ok.parquet: column=id holds int64, text is needed",
        ("from=broken.jsonl",): "broken.jsonl:2: not a line of JSON",
        ("from=list.jsonl",): "list.jsonl:1: list found, a JSON object",
        ("from=number.jsonl",): "number.jsonl:1: column=text holds int, text is needed",
        ("from=no.parquet",): "no.parquet: not a Parquet file",
        ("from=cut.jsonl.gz",): "cut.jsonl.gz: cannot be read to its end",
        ("from=blank.txt",): "from=blank.txt: no document is left (1 empty, 0 not UTF-8)",
        ("from=.",): "files of several formats (jsonl, parquet, text)",
        ("from=.", "pattern=*.csv"): "no file matches pattern='*.csv'",
        ("from=ok.jsonl", "out=o.bin"): "out=o.bin: must be what the files' names begin with",
        ("from=ok.jsonl", "shard_size=0"): "shard_size=0",
        ("from=ok.jsonl", "workers=0"): "workers=0",
        ("from=ok.jsonl", "limit=0"): "limit=0",
        ("from=ok.jsonl", "unit=word"): "unit=word",
        ("from=ok.jsonl", "format=csv"): "format=csv",
        ("from=ok.jsonl", "tokenizer=none.json"): "none.json: cannot read a tokenizer.json",
        ("from=/proc/self/mem",): "/proc/self/mem: cannot be read",
        ("from=/dev/null",): "neither a file nor a folder",
    }  # fmt: skip


def test_bad_input_is_one_line_with_what_is_valid_and_leaves_nothing(tmp_path, tokenizer, here, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = bad(tmp_path)
    before = sorted(tmp_path.iterdir())
    for arguments, words in cases.items():
        given = {"out": "o", "tokenizer": tokenizer, **dict(argument.split("=", 1) for argument in arguments)}
        assert main(["prepare", *(f"{key}={value}" for key, value in given.items())]) == 2, arguments
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1, (arguments, message)
    assert sorted(tmp_path.iterdir()) == before


def test_files_of_another_preparation_are_not_overwritten(tmp_path, tokenizer, here):
    prepare(config(write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "t", tokenizer))
    with pytest.raises(InputError, match=r"t.json is of another preparation \(source\)"):
        prepare(config(tmp_path / "a.jsonl", tmp_path / "t", tokenizer, "format=text"))
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(InputError, match=r"t.json is of another preparation \(source\)"):
        prepare(config(tmp_path / "a.jsonl", tmp_path / "t", tokenizer))
    (tmp_path / "t.json").unlink()
    with pytest.raises(InputError, match="t.idx exists and is none of this command's"):
        prepare(config(tmp_path / "a.jsonl", tmp_path / "t", tokenizer))


def test_one_process_at_a_time_prepares_a_file(tmp_path):
    folder = shards.ShardFolder(str(tmp_path / "t"), {"a": 1})
    with pytest.raises(InputError, match="another process is preparing it now"):
        shards.ShardFolder(str(tmp_path / "t"), {"a": 1})
    folder.close()
    shards.ShardFolder(str(tmp_path / "t"), {"a": 2}).close()
