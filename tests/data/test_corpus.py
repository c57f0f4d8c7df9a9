"""Corpora: built once, found again, safe beside a second builder; ready token files; what is wrong with them."""

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_format
from dstrain.config.errors import InputError
from dstrain.config.schema import DataConfig
from dstrain.data import corpus as module
from dstrain.data.corpus import open_corpus
from dstrain.data.indexed import IndexedDataset, IndexedWriter
from dstrain.data.tokenizer import Tokenizer

LINE = "The quick brown fox, number {}, jumps over <｜end▁of▁sentence｜> the lazy dog — é 🎉.\n"
SCRIPT = Path(__file__).parents[2] / "data/build_corpus.py"


def write_texts(folder, count=12):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02}.txt").write_text("".join(LINE.format(i * 100 + n) for n in range(20)), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    config = DataConfig(8, text=write_texts(root / "My texts!"), vocab_size=300, cache=str(root / "cache"))
    return config, open_corpus(config)


def test_every_document_is_one_text_between_its_marks(built):
    """D05: one begin and one end a document, none inside, though every line spells one; the files come back."""
    config, corpus = built
    tokenizer = Tokenizer.load(corpus.tokenizer)
    found = []
    for prefix in (corpus.train, corpus.heldout):
        for ids in megatron_format.read(prefix)[0]:
            assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
            assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids[1:-1])
            found.append(tokenizer.decode(ids))
    assert sorted(found) == sorted(path.read_text(encoding="utf-8") for path in Path(config.text).iterdir())


def test_the_counts_are_those_of_the_files(built):
    config, corpus = built
    train, heldout = IndexedDataset(corpus.train), IndexedDataset(corpus.heldout)
    assert (corpus.train_documents, corpus.train_tokens) == (train.num_documents, train.num_tokens)
    assert (corpus.heldout_documents, corpus.heldout_tokens) == (heldout.num_documents, heldout.num_tokens)
    sizes = sum(path.stat().st_size for path in Path(config.text).iterdir())
    assert corpus.train_bytes + corpus.heldout_bytes == sizes
    # The bytes that the ids stand for are the bytes of the texts.
    counts = Tokenizer.load(corpus.tokenizer).token_bytes()
    for dataset, size in ((train, corpus.train_bytes), (heldout, corpus.heldout_bytes)):
        assert counts[dataset.ids(0, dataset.size)].sum() == size


def test_compression_is_that_of_gzip_and_xz_on_the_concatenated_heldout_texts(built):
    _, corpus = built
    tokenizer = Tokenizer.load(corpus.tokenizer)
    heldout = IndexedDataset(corpus.heldout)
    text = "".join(tokenizer.decode(heldout.document(i)) for i in range(heldout.num_documents)).encode()
    assert corpus.gzip_bits_per_byte == pytest.approx(8 * len(gzip.compress(text, 9)) / len(text))
    assert corpus.xz_bits_per_byte == pytest.approx(8 * len(lzma.compress(text, preset=9)) / len(text))


def test_a_corpus_is_found_again_and_not_rebuilt(built, monkeypatch):
    config, corpus = built
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("built twice"))
    assert open_corpus(config) == corpus
    assert Path(corpus.folder).name.startswith("My-texts-v300-")
    assert [p.name for p in Path(config.cache).iterdir()] == [Path(corpus.folder).name]


def test_a_second_build_gives_the_same_bytes(built, tmp_path):
    config, corpus = built
    again = open_corpus(DataConfig(8, text=config.text, vocab_size=300, cache=str(tmp_path)))
    names = sorted(p.name for p in Path(corpus.folder).iterdir())
    assert names == ["corpus.json", "heldout.bin", "heldout.idx", "tokenizer.json", "train.bin", "train.idx"]
    for name in names:
        assert (Path(corpus.folder) / name).read_bytes() == (Path(again.folder) / name).read_bytes()


def test_another_text_vocabulary_or_tokenizer_is_another_corpus(built, tmp_path):
    config, corpus = built
    fingerprints = {corpus.fingerprint}
    text = write_texts(tmp_path / "texts")
    for values in ({"vocab_size": 300}, {"vocab_size": 310}, {"tokenizer": corpus.tokenizer}, {"pattern": "0*"}):
        other = open_corpus(DataConfig(8, text=text, cache=str(tmp_path / "cache"), **({"vocab_size": 300} | values)))
        fingerprints.add(other.fingerprint)
    (Path(text) / "00.txt").write_text("changed\n")
    fingerprints.add(open_corpus(DataConfig(8, text=text, vocab_size=300, cache=str(tmp_path / "cache"))).fingerprint)
    assert len(fingerprints) == 5 and corpus.fingerprint in fingerprints  # the first is the same text at another place


def test_one_file_becomes_two_documents(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(LINE.format(n) for n in range(200)), encoding="utf-8")
    corpus = open_corpus(DataConfig(8, text=str(path), vocab_size=300, cache=str(tmp_path / "cache")))
    tokenizer = Tokenizer.load(corpus.tokenizer)
    parts = [tokenizer.decode(IndexedDataset(prefix).document(0)) for prefix in (corpus.train, corpus.heldout)]
    assert (corpus.train_documents, corpus.heldout_documents) == (1, 1)
    assert "".join(parts) == path.read_text(encoding="utf-8")


def test_builders_beside_each_other_leave_one_complete_corpus(tmp_path):
    text, cache = write_texts(tmp_path / "texts", 4), tmp_path / "cache"
    command = [sys.executable, str(SCRIPT), f"text={text}", "vocab_size=300", f"cache={cache}"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0] and len(outputs) == 1
    assert "gzip -9" in outputs.pop()
    (folder,) = cache.iterdir()
    assert (folder / "corpus.json").is_file()


def test_a_builder_that_finishes_second_takes_the_first_ones_corpus(built, tmp_path, monkeypatch):
    config, corpus = built
    build = module._build

    def slow(building, folder, *rest):
        build(building, folder, *rest)
        folder.mkdir()  # another builder got there first
        build(folder, folder, *rest)
        (folder / "first").touch()

    monkeypatch.setattr(module, "_build", slow)
    again = open_corpus(DataConfig(8, text=config.text, vocab_size=300, cache=str(tmp_path / "cache")))
    assert again.fingerprint == corpus.fingerprint and (Path(again.folder) / "first").is_file()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_build_that_fails_leaves_nothing(built, tmp_path, monkeypatch):
    config, _ = built

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_tokens", full)
    with pytest.raises(InputError, match="cache.*no space left on device"):
        open_corpus(DataConfig(8, text=config.text, vocab_size=300, cache=str(tmp_path / "cache")))
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_that_is_no_folder_is_named(built, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError, match="data.cache="):
        open_corpus(DataConfig(8, text=built[0].text, vocab_size=300, cache=str(tmp_path / "cache")))


def test_only_old_leftovers_of_killed_builds_are_removed(built, tmp_path):
    cache = tmp_path / "cache"
    for name, age in ((".building-1-old", 2 * 24 * 3600), (".building-2-new", 60)):
        (cache / name).mkdir(parents=True)
        stamp = (cache / name).stat().st_mtime - age
        os.utime(cache / name, (stamp, stamp))
    open_corpus(DataConfig(8, text=built[0].text, vocab_size=300, cache=str(cache)))
    assert [p.name for p in cache.glob(".building-*")] == [".building-2-new"]


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("corpus.json", lambda path: path.unlink(), "missing or damaged"),
        ("corpus.json", lambda path: path.write_text("{}"), "missing or damaged"),
        ("corpus.json", lambda path: path.write_text("{"), "missing or damaged"),
        ("train.bin", lambda path: os.truncate(path, 40), "train.bin: 40 bytes found"),
        ("heldout.idx", lambda path: path.unlink(), "heldout.idx: no such file"),
        ("tokenizer.json", lambda path: path.write_text("x"), "not a tokenizer.json"),
        ("train", lambda path: megatron_format.write(path, [[[0, 1]]]), "train.bin: 2 tokens found"),
    ],
)
def test_a_damaged_corpus_is_named(tmp_path, name, change, words):
    config = DataConfig(8, text=write_texts(tmp_path / "texts", 3), vocab_size=270, cache=str(tmp_path / "cache"))
    change(Path(open_corpus(config).folder) / name)
    with pytest.raises(InputError, match=words):
        open_corpus(config)


def test_ready_token_files_are_used_as_they_are(built, tmp_path):
    _, corpus = built
    megatron_format.write(tmp_path / "mine", [[[0, 50, 1]], [[0, 51, 52, 1]]], code=8)
    config = DataConfig(8, train=str(tmp_path / "mine"), tokenizer=corpus.tokenizer)
    ready = open_corpus(config)
    assert (ready.train, ready.heldout, ready.tokenizer) == (str(tmp_path / "mine"), None, corpus.tokenizer)
    assert (ready.train_documents, ready.train_tokens, ready.heldout_tokens) == (2, 7, 0)
    assert ready.folder is None and ready.gzip_bits_per_byte is None
    config.heldout = corpus.heldout
    both = open_corpus(config)
    assert both.heldout_tokens == corpus.heldout_tokens
    megatron_format.write(tmp_path / "mine", [[[0, 50, 1, 0]], [[51, 52, 1]]], code=8)  # the same ids, cut elsewhere
    cut = open_corpus(DataConfig(8, train=str(tmp_path / "mine"), tokenizer=corpus.tokenizer))
    megatron_format.write(tmp_path / "mine", [[[0, 50, 1]], [[0, 51, 53, 1]]], code=8)
    other = open_corpus(DataConfig(8, train=str(tmp_path / "mine"), tokenizer=corpus.tokenizer))
    assert len({c.fingerprint for c in (ready, both, cut, other)}) == 4


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(built, tmp_path):
    """D01."""
    _, corpus = built
    size = Tokenizer.load(corpus.tokenizer).vocab_size
    for position, bad in ((5, size), (0, 128815), (6, -2)):
        ids = [0, 1, 2, 3, 4, size - 1, 1]
        ids[position] = bad
        megatron_format.write(tmp_path / "mine", [[ids[:3]], [ids[3:]]])
        with pytest.raises(InputError, match=rf"mine.bin: token id {bad} at token {position}, .*0 … {size - 1}"):
            open_corpus(DataConfig(8, train=str(tmp_path / "mine"), tokenizer=corpus.tokenizer))


def test_contradicting_settings_are_refused(built, tmp_path):
    _, corpus = built
    with IndexedWriter(tmp_path / "a") as writer:
        writer.add_document([0, 1])
    prefix = str(tmp_path / "a")
    cases = [
        (dict(text="x", train=prefix, tokenizer=corpus.tokenizer), "exclude each other"),
        (dict(train=prefix), "needs data.tokenizer"),
        (dict(heldout=prefix), "needs data.train"),
        (dict(train=prefix + "b", tokenizer=corpus.tokenizer), "ab.idx: no such file"),
        (dict(train=prefix, heldout="none", tokenizer=corpus.tokenizer), "none.idx: no such file"),
        (dict(train=prefix, tokenizer=str(tmp_path / "t.json")), "t.json: cannot read"),
        (dict(vocab_size=263), "data.vocab_size=263: 264 is the least"),
    ]
    for values, words in cases:
        with pytest.raises(InputError, match=words):
            open_corpus(DataConfig(8, cache=str(tmp_path / "cache"), **values))


def test_the_script_ends_with_2_and_one_line_on_bad_input(tmp_path):
    for arguments, words in (
        (["txt=a"], "did you mean 'text'"),
        (["vocab_size=many"], "whole number"),
        ([f"text={tmp_path / 'none'}"], "no such file"),
    ):
        run = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
        assert run.returncode == 2 and run.stdout == ""
        assert words in run.stderr and run.stderr.count("\n") == 1 and "Traceback" not in run.stderr


def test_the_stdlib_corpus_has_useful_figures(tmp_path):
    """A small vocabulary keeps this quick. Compressors reach 1.5 to 2.5 bits per byte on Python code."""
    corpus = open_corpus(DataConfig(8, vocab_size=512, cache=str(tmp_path)))
    assert 1.3 < corpus.xz_bits_per_byte < corpus.gzip_bits_per_byte < 2.6
    assert corpus.train_tokens > 1_000_000 and 300_000 < corpus.heldout_bytes < 600_000
    known = json.loads((Path(corpus.folder) / "corpus.json").read_text())
    assert known["train_tokens"] == corpus.train_tokens and "folder" not in known
