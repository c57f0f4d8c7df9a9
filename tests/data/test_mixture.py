"""Mixtures: shares in every window, whose turn a sample is, changes of shares at a token count, and resuming."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

import megatron_format
from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.config.schema import Segment, SourceConfig
from dstrain.data.corpus import open_corpus
from dstrain.data.indexed import IndexedDataset
from dstrain.data.mixture import STEPS, Mixture, Turns, floor_sum, open_stream, share_pieces
from dstrain.data.samples import SampleStream
from dstrain.data.tokenizer import Tokenizer
from helpers import make_config, metrics, run

TASKS = {"math": 25, "code": 20, "reasoning": 20, "fact": 20, "dialogue": 15}


def counted(turns, n, sources):
    """Samples of each source among the first 0, 1, …, n, by asking for every turn."""
    counts, history = [0] * sources, [[0] * sources]
    for i in range(n):
        counts[turns.source(i)] += 1
        history.append(list(counts))
    return history


def test_floor_sum_is_the_sum():
    draw = random.Random(0)
    for _ in range(3000):
        n, m, a, b = (draw.randrange(60) for _ in range(4))
        m += 1
        assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@pytest.mark.parametrize("shares", [[0.999, 0.001], [25, 20, 20, 20, 15], [1 / 3, 1e-4, 0.5, 0, 2], [7]])
@pytest.mark.parametrize("seed", [0, 1234])
def test_shares_hold_over_every_window_of_a_few_thousand_samples(shares, seed):
    """Within 1 % over 10,000 samples is a hundred of them; here every window is within 5, and a share of 0 has none."""
    turns, total = Turns([(0, shares)], seed), sum(shares)
    history = counted(turns, 24_000, len(shares))
    for window in (2000, 10_000):
        for first in range(0, 24_000 - window, 61):
            for k, share in enumerate(shares):
                found = history[first + window][k] - history[first][k]
                assert abs(found - window * share / total) < 5 and (share or not found)
    assert sum(history[10_000]) == 10_000


def test_small_windows_hold_their_shares_nearly_too():
    """A step of 40 samples of the five tasks: no source is off by more than 3 of its 6 to 10."""
    history = counted(Turns([(0, list(TASKS.values()))], 5), 4000, 5)
    for first in range(0, 3960, 40):
        for k, share in enumerate(TASKS.values()):
            assert abs(history[first + 40][k] - history[first][k] - 0.4 * share) <= 3


PIECES = [(0, [3, 1, 0]), (1000, [1, 1, 2]), (1001, [0, 1, 0]), (2500, [0.2, 0.3, 0.5])]


def test_counts_are_those_of_the_turns_through_changes_of_shares():
    turns = Turns(PIECES, 77)
    history = counted(turns, 4000, 3)
    assert [turns.counts(n) for n in range(4001)] == history
    far = 10**15
    before, after = turns.counts(far), turns.counts(far + 1)
    assert sum(before) == far and [b - a for a, b in zip(before, after)].index(1) == turns.source(far)


def test_turns_are_fixed_for_good():
    """Written down once: another version of this code must not reorder a run that is under way."""
    assert [Turns([(0, [25, 20, 20, 20, 15])], 1234).source(n) for n in range(24)] == TURNS
    one, other = (Turns([(0, [1, 1])], seed) for seed in (5, 6))
    assert [one.source(n) for n in range(12)] != [other.source(n) for n in range(12)]


TURNS = [3, 1, 4, 2, 0, 3, 1, 0, 3, 1, 4, 2, 0, 3, 1, 0, 2, 0, 4, 2, 0, 3, 1, 4]


def source(task, share, *segments, **more):
    return SourceConfig(task, share, "unused", schedule=[Segment(*segment) for segment in segments], **more)


def test_a_share_changes_at_the_first_sample_that_begins_at_the_token_count():
    """100 tokens a sample: 1000 tokens are sample 10; 1001 are within sample 10, so sample 11 is the first after; 50 %
    of 8000 tokens is sample 40."""
    sources = [source("a", 3, (1000, 3.0), ("50%", 5.0)), source("b", 1, (1001, 1.0), (8000, 0.0))]
    pieces = share_pieces(sources, 8000, 100)
    assert pieces == [(0, [3, 1]), (10, [5, 1]), (11, [5, 0]), (40, [5, 0]), (80, [5, 0])]


def test_a_slope_gives_the_samples_under_it():
    """Linear from 0 to 1 beside a constant 1 over n samples: the integral of x / (1 + x) is 1 - ln 2 of them; cosine:
    that of s / (1 + s) with s = (1 - cos pi x) / 2, 1 - 1 / sqrt 2."""
    n = 100_000
    for shape, part in (("linear", 1 - 0.69314718), ("cosine", 1 - 2**-0.5)):
        pieces = share_pieces([source("a", 0, (1e6, 1.0, shape)), source("b", 1)], 1e7, 10)
        assert len(pieces) == STEPS + 1 and pieces[-1] == (n, [1.0, 1])
        assert abs(Turns(pieces, 3).counts(n)[0] - part * n) < 0.001 * n
    short = share_pieces([source("a", 0, (30, 1.0, "linear")), source("b", 1)], 1e7, 10)
    assert [first for first, _ in short] == [0, 1, 2, 3]


def write_sources(folder, names=("a", "b", "c"), documents=(7, 30, 12)):
    """Token files whose ids tell source, document and place."""
    for k, (name, count) in enumerate(zip(names, documents)):
        texts = [[[100_000 * k + 100 * i + j for j in range(1 + (7 * i) % 23)]] for i in range(count)]
        megatron_format.write(folder / name, texts)
    return [IndexedDataset(folder / name) for name in names]


def mixture(datasets, shares=(5, 3, 2), seed=9):
    streams = [SampleStream(dataset, seed + k, 8, 1) for k, dataset in enumerate(datasets)]
    sources = [source("text", 5, name="a"), source("code", 3, name="b"), source("text", 2, name="c")]
    return Mixture(sources, streams, Turns([(0, list(shares)), (60, [1, 1, 8])], seed))


def test_each_source_gives_its_own_stream_without_a_gap(tmp_path):
    """The samples of a source, in the order of their turns, are the visits 0, 1, … of its stream alone."""
    datasets = write_sources(tmp_path)
    mixed = mixture(datasets)
    tokens, documents = mixed.batch(0, 400)
    seen = [0, 0, 0]
    for n in range(400):
        k = int(tokens[n, 0]) // 100_000
        assert (k, seen[k]) == mixed.place(n)
        right = SampleStream(datasets[k], 9 + k, 8, 1).batch(seen[k], 1)
        assert torch.equal(tokens[n], right[0][0]) and torch.equal(documents[n], right[1][0])
        seen[k] += 1
    assert min(seen) > 50 and seen == mixed.turns.counts(400)
    with pytest.raises(IndexError):
        mixed.sample(-1)


@pytest.mark.parametrize("stop", [1, 37, 59, 60, 61, 200])
def test_a_mixture_goes_on_from_any_sample(tmp_path, stop):
    """A20: the next sample's number is all that is known; A18: on any number of ranks."""
    datasets = write_sources(tmp_path)
    whole, _ = mixture(datasets).batch(0, 240)
    rest = mixture(datasets)
    assert torch.equal(torch.cat([mixture(datasets).batch(0, stop)[0], rest.batch(stop, 240 - stop)[0]]), whole)
    shared = [mixture(datasets).batch(first, 20)[0] for first in range(0, 240, 20)]
    assert torch.equal(torch.cat(shared), whole)
    assert [rest.sample(n)[0].tolist() for n in range(235, 240)] == whole[235:].tolist()


def test_a_source_that_runs_empty_begins_its_next_epoch(tmp_path):
    """Over many epochs every token comes equally often, up to the epoch that is under way."""
    datasets = write_sources(tmp_path)
    mixed = Mixture([source("a", 1)], [SampleStream(datasets[0], 9, 8, 1)], Turns([(0, [1])], 9))
    size = datasets[0].num_tokens
    block = mixed.streams[0].block  # visits of a block are samples of a block, whose order is scattered
    targets = mixed.batch(0, 29 * block)[0][:, 1:9].flatten().tolist()
    counts = {token: targets.count(token) for token in set(targets)}
    epochs = 29 * block * 8 / size
    assert len(counts) == size and all(abs(count - epochs) <= 1.5 for count in counts.values())
    assert mixed.metrics(29 * block)["data_epochs"] == {"a": pytest.approx(epochs)}


def test_metrics_are_counted_by_source_and_task(tmp_path):
    datasets = write_sources(tmp_path)
    mixed = mixture(datasets)
    counts = [[mixed.place(n)[0] for n in range(50)].count(k) for k in range(3)]
    found = mixed.metrics(50)
    assert found["data_shares"] == {name: pytest.approx(c / 50) for name, c in zip("abc", counts)}
    tasks = {"text": (counts[0] + counts[2]) / 50, "code": counts[1] / 50}
    assert found["data_task_shares"] == pytest.approx(tasks)
    assert found["data_epochs"] == {
        name: pytest.approx(c * 8 / data.num_tokens) for name, c, data in zip("abc", counts, datasets)
    }
    late = mixed.metrics(60 + 4096 + 1000)["data_shares"]  # of the last 4096, long after the change at sample 60
    assert abs(late["a"] - 0.1) < 0.001 and abs(late["c"] - 0.8) < 0.001
    assert mixed.metrics(0)["data_shares"] == {"a": 0, "b": 0, "c": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train(["some text"], 270).save(path)
    return str(path)


def write_texts(folder, tokenizer, names):
    encode = Tokenizer.load(tokenizer).encode_document
    for name in names:
        megatron_format.write(folder / name, [[encode(f"{name} {i} some text " * 6)] for i in range(25)])


def sources_of(folder, *names, **more):
    return "[" + ",".join(
        f"{{task: {name}, share: {share}, train: {folder / name}{more.get(name, '')}}}" for name, share in names
    ) + "]"


def of_config(config):
    corpus = open_corpus(config.data)
    return open_stream(config, corpus, Tokenizer.load(corpus.tokenizer))


def test_a_source_keeps_its_order_when_others_come_and_go(tmp_path, tokenizer):
    write_texts(tmp_path, tokenizer, ["math", "code", "fact"])
    make = lambda *names: of_config(make_config(  # noqa: E731
        tmp_path, f"data.sources={sources_of(tmp_path, *names)}", "data.text=null", f"data.tokenizer={tokenizer}",
    ))
    one, other = make(("math", 1), ("code", 2)), make(("fact", 9), ("code", 1), ("math", 1))
    for left, right in ((0, 2), (1, 1)):
        assert torch.equal(one.streams[left].batch(0, 50)[0], other.streams[right].batch(0, 50)[0])
    assert one.streams[0].seed != one.streams[1].seed


def test_a_source_has_its_own_rate_of_fill_in_the_middle(tmp_path, tokenizer):
    write_texts(tmp_path, tokenizer, ["math", "code", "fact"])
    names = sources_of(tmp_path, ("math", 1), ("code", 1), ("fact", 1), code=", fim_rate: 0.4", fact=", fim_rate: 0.0")
    mixed = of_config(make_config(
        tmp_path, f"data.sources={names}", "data.text=null", f"data.tokenizer={tokenizer}", "data.fim_rate=1.0",
    ))  # fmt: skip
    sizes = [stream.epochs.num_tokens for stream in mixed.streams]
    rearranged = {"math": 25, "code": 10, "fact": 0}
    assert sizes == [IndexedDataset(tmp_path / name).num_tokens + 3 * n for name, n in rearranged.items()]


def test_the_example_is_a_complete_configuration():
    config = compose("train", ["data=mixture"])[0]
    assert {source.task: source.share for source in config.data.sources} == TASKS
    changed = compose("train", ["data=mixture", "data.sources.1.share=0", "data.sources.0.train=x"])[0].data.sources
    assert changed[1].share == 0 and changed[0].train == "x" and len(changed) == 5


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ("[]", "data.sources is empty"),
        ("[{task: a, share: -1, train: x}]", "data.sources.0.share=-1.0: must be at least 0"),
        ("[{task: a, share: 0, train: x},{task: b, share: 0, train: x}]", "data.sources: all shares are 0"),
        ("[{task: a, share: 1, train: x},{task: a, share: 1, train: y}]", "two are called 'a'"),
        ("[{task: a, share: 1, train: x, fim_rate: 1.5}]", "data.sources.0.fim_rate=1.5: must be null"),
        ("[{task: a, share: 1, train: x, schedule: [{until: 5, value: -1}]}]", "data.sources.0.schedule.0.value=-1.0"),
        ("[{task: a, share: 1, train: x, schedule: [{until: 5, value: 1},{until: 4, value: 1}]}]",
         "data.sources.0.schedule.1.until=4"),
        ("[{task: a, share: 1, train: ''}]", "data.sources.0.train is empty"),
        ("[{task: a, train: x}]", "missing key 'data.sources.0.share'"),
        ("[{task: a, share: 1, train: x, weight: 1}]", "unknown key 'data.sources.0.weight'"),
        ("5", "data.sources"),
    ],
)  # fmt: skip
def test_bad_sources_are_one_line(sources, words):
    with pytest.raises(InputError) as error:
        compose("train", [f"data.sources={sources}"])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_more_bad_input(tmp_path, tokenizer):
    write_texts(tmp_path, tokenizer, ["math"])
    megatron_format.write(tmp_path / "none", [[[]], [[]]])
    megatron_format.write(tmp_path / "big", [[[5] * 99 + [270]]])

    def fails(*overrides):
        with pytest.raises(InputError) as error:
            of_config(make_config(tmp_path, "data.text=null", f"data.tokenizer={tokenizer}", *overrides))
        return str(error.value)

    both = lambda name: f"data.sources={sources_of(tmp_path, ('math', 1), (name, 1))}"  # noqa: E731
    assert "none.bin: 0 tokens found, one sample needs" in fails(both("none"))
    assert "missing.idx: no such file" in fails(both("missing"))
    assert "big.bin: token id 270 at token 99" in fails(both("big"))
    one = f"data.sources={sources_of(tmp_path, ('math', 1))}"
    assert "data.sources needs data.tokenizer" in fails(one, "data.tokenizer=null")
    assert "data.sources excludes data.text and data.train" in fails(one, "data.train=x")
    ends = ", schedule: [{until: 1600, value: 1},{until: 3200, value: 0}]"
    ends = f"data.sources={sources_of(tmp_path, ('math', 1), math=ends)}"
    assert "all shares are 0 from sample 100 on" in fails(ends)
    with pytest.raises(InputError, match="data.fim_rate=2.0: must be at least 0 and at most 1"):
        make_config(tmp_path, "data.fim_rate=2")


def test_a_run_on_a_mixture_resumed_at_any_step_is_the_unbroken_one(tmp_path, tokenizer):
    """Losses and metrics of six steps, with a change of shares at sample 10 (step 3) and fill-in-the-middle."""
    write_texts(tmp_path, tokenizer, ["math", "code"])
    change = ", schedule: [{until: 160, value: 3},{until: 1e6, value: 1}]"
    names = sources_of(tmp_path, ("math", 3), ("code", 1), math=change)
    options = (f"data.sources={names}", "data.text=null", f"data.tokenizer={tokenizer}", "data.fim_rate=0.5")

    def start(name, steps):
        config = make_config(tmp_path, *options, f"run.name={name}", f"run.steps={steps}", "checkpoint.keep=9")
        assert run(config) == 0
        return config

    whole = metrics(start("whole", 6))
    for steps in (2, 3, 6):
        config = start("parts", steps)
    kept = [key for key in whole[0] if key not in ("step_time", "tokens_per_second", "mfu")]
    parts = metrics(config)
    assert [[row[key] for key in kept] for row in parts] == [[row[key] for key in kept] for row in whole]
    assert sum(whole[5]["data_shares"].values()) == pytest.approx(1) and whole[5]["data_epochs"]["math"] > 0
    corpus = open_corpus(config.data)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=config.data.sources[:1]))
    assert open_corpus(other.data).fingerprint != corpus.fingerprint
    assert Path(corpus.sources[0]).name == "math" and corpus.train_documents == 50
