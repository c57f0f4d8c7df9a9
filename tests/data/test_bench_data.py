"""tools/bench_data.py at tiny sizes: each part measures what it says, and its arithmetic is right."""

import sys
from pathlib import Path

import pytest

from dstrain.data.indexed import IndexedDataset
from dstrain.data.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import bench_data  # noqa: E402

OPTIONS = bench_data.DEFAULTS | {
    "documents": "3e3", "tokens": "1e5", "sequence": "16", "batch": "2", "model": "tiny", "precision": "fp32",
    "threads": "1", "rounds": "2",
}


class Here:
    """In place of the pipe to another process."""

    def send(self, what):
        self.sent = what


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    bench_data.make_set(folder, 3000, 100_000)
    return folder


def test_the_set_has_the_documents_and_about_the_tokens_asked_for(folder):
    data = IndexedDataset(folder / "set4")
    assert data.num_documents == 3000 and abs(data.num_tokens - 100_000) < 6 * 33 * 3000**0.5  # geometric: deviation 33
    assert data.read(2999, 0, data.length(2999)).tolist() == [0] * data.length(2999)


@pytest.mark.parametrize("kind, sources", [("one", 1), ("fim", 1), ("mixture", 5)])
def test_a_start_is_timed_and_weighed(folder, kind, sources):
    here = Here()
    bench_data.start_once(here, OPTIONS, bench_data.overrides(kind, OPTIONS, folder))
    assert here.sent["index_mb"] * 1e6 == pytest.approx(sources * (34 + 12 * 3000 + 8 * 3001))
    assert 0 < here.sent["seconds"] < 60 and kind in bench_data.start_table(OPTIONS, {kind: here.sent})


def test_the_loader_is_a_small_part_of_a_step(folder):
    here, kinds = Here(), ("one", "mask", "fim", "mixture")
    bench_data.load(here, OPTIONS, {kind: bench_data.overrides(kind, OPTIONS, folder) for kind in kinds})
    seconds, share = here.sent["seconds"], here.sent["share"]
    assert share.keys() == set(kinds) and all(share[k] == seconds[k] / seconds["step"] for k in kinds)
    assert "| mixture |" in bench_data.loader_table(OPTIONS, here.sent)


def test_start_up_and_rate_come_from_two_sizes(tmp_path, monkeypatch):
    """A stand-in with 3 s of start-up at 2 MB/s beside ones at 2.2 and 1 MB/s: 1.1 and 0.5 times its rate."""
    rates = {"prepare": (3.0, 2.0), "encode_batch": (0.5, 2.2), "encode_batch_fast": (0.0, 1.0)}

    def stand_in(name, source, tokenizer, options):
        size = sum(len(line) for line in source.read_text().splitlines()) - texts(source) * len('{"text": ""}')
        start, rate = rates[name]
        return start + size / 1e6 / rate

    def texts(source):
        return len(source.read_text().splitlines())

    monkeypatch.setattr(bench_data, "library_texts", lambda: ["a plain text " * 50] * 20)
    monkeypatch.setattr(bench_data, "ours", stand_in)
    monkeypatch.setattr(bench_data, "theirs", stand_in)
    results = bench_data.prepare(OPTIONS | {"megabytes": "0.2", "vocab_size": "300"}, tmp_path)
    for name, (start, rate) in rates.items():
        assert results[name]["start_up"] == pytest.approx(start, abs=1e-9)
        assert results[name]["mb_per_second"] == pytest.approx(rate)
    assert results["times_of_encode_batch"] == pytest.approx(1.1)
    assert results["times_of_encode_batch_fast"] == pytest.approx(0.5)
    assert "1.10 times" in bench_data.prepare_table(OPTIONS, results)


def test_both_sides_of_prepare_run(tmp_path):
    texts = ["def f():\n    return 1\n" * 5] * 40
    bench_data.write_lines(tmp_path / "a.jsonl", texts, 3000)
    Tokenizer.train(texts, 300).save(tmp_path / "code.json")
    options = OPTIONS | {"clock": "cpu"}
    assert 0 < bench_data.theirs("encode_batch", tmp_path / "a.jsonl", tmp_path / "code.json", options) < 60
    assert 0 < bench_data.ours("prepare", tmp_path / "a.jsonl", tmp_path / "code.json", options) < 120
    assert IndexedDataset(tmp_path / "out").num_documents == 28  # of 110 bytes: the last begins below 3000
