"""The tokenizer: exact round trips, document marks, streams of broken characters, foreign tokenizers."""

import hashlib
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from dstrain.config.errors import InputError
from dstrain.data import tokenizer as module
from dstrain.data.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer, short_words, text_pieces

TEXT = "def area(a, b):\n    return a * b\n\n\nclass Shape:\n    def name(self):\n        pass  # é\n" * 20


@pytest.fixture(scope="module")
def trained():
    return Tokenizer.train([TEXT, "for i in range(1234567):\n    print(i)\n"], 400)


def test_special_tokens_come_first_and_are_found_by_name(trained):
    """DeepSeek's ids of begin, end and padding are 0, 1 and 2."""
    assert (trained.bos_id, trained.eos_id, trained.pad_id) == (0, 1, 2)
    assert trained.decode(range(len(SPECIAL_TOKENS))) == ""
    assert trained.vocab_size <= 400


def test_documents_have_exactly_one_begin_and_one_end(trained):
    """D05: exact ids; a byte without a merge is its own token, so 'a' is one id."""
    a, b = trained.encode_document("a"), trained.encode_document("b")
    assert len(a) == len(b) == 3 and a[0] == b[0] == 0 and a[-1] == b[-1] == 1 and a[1] != b[1]
    assert trained.encode_document("") == [0, 1]
    assert trained.encode_documents(["a", "", "b"]) == [a, [0, 1], b]


@pytest.mark.parametrize("mark", SPECIAL_TOKENS)
def test_text_that_spells_a_control_token_is_no_boundary(trained, mark):
    """D05: a literal mark in a document stays text and comes back; in a prompt it is the token."""
    ids = trained.encode_document(f"x{mark}y")
    assert not set(ids[1:-1]) & set(range(len(SPECIAL_TOKENS)))
    assert trained.decode(ids) == f"x{mark}y"
    prompt = trained.encode_prompt(f"x{mark}y")
    assert prompt[0] == 0 and prompt[1:] != ids[1:-1] and SPECIAL_TOKENS.index(mark) in prompt[1:]


SAMPLES = [
    "", " ", "a", "\n\n\r\n\t x", "naïve — 日本語 🎉👩‍👩‍👧 \u0000\ufeff\ufffd",
    "x = 1234567890.5\n" * 3, "    " * 9, "e\u0301",
]  # fmt: skip


@pytest.mark.parametrize("text", SAMPLES)
def test_any_text_comes_back(trained, text):
    ids = trained.encode_document(text)
    assert trained.decode(ids) == text
    assert trained.token_bytes()[ids].sum() == len(text.encode())


def test_every_byte_has_a_token(trained):
    """Byte-level: 256 one-byte tokens exist, whatever was seen in training."""
    pieces = trained._pieces
    assert {bytes([b]) for b in range(256)} <= set(pieces)
    assert [len(p) for p in pieces] == trained.token_bytes().tolist()
    assert trained.token_bytes().dtype == np.int64 and trained.token_bytes()[:8].sum() == 0


def test_a_line_end_keeps_the_indentation_that_follows(trained):
    pieces = [trained._pieces[i] for i in trained.encode_document("def f(x):\n        return 1234567")]
    assert b"\n        " in pieces
    # A prompt that stops at the colon is cut as the file is.
    prompt = trained.encode_prompt("def f(x):")
    assert trained.encode_document("def f(x):\n        return 1234567")[: len(prompt)] == prompt


def test_digits_are_cut_into_at_most_three_however_often_a_number_occurs():
    tokenizer = Tokenizer.train(["1234567 " * 50], 300)
    pieces = [tokenizer._pieces[i] for i in tokenizer.encode_document("1234567")]
    assert pieces == [b"", b"123", b"456", b"7", b""]


def test_training_twice_gives_the_same_file():
    """In two processes with other hash seeds and other numbers of threads."""
    code = (
        "import sys, hashlib; from dstrain.data.tokenizer import Tokenizer;"
        "texts = [open(p, encoding='utf-8').read() for p in sys.argv[1:]];"
        "print(hashlib.sha256(Tokenizer.train(texts, 600)._definition.encode()).hexdigest())"
    )
    files = [module.__file__, json.__file__, subprocess.__file__]
    digests = set()
    for seed, threads in (("1", "1"), ("2", "3")):
        variables = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", code, *files]
        run = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        digests.add(run.stdout.strip())
    texts = [open(path, encoding="utf-8").read() for path in files]
    digests.add(hashlib.sha256(Tokenizer.train(texts, 600)._definition.encode()).hexdigest())
    assert len(digests) == 1


def test_saving_and_loading_keeps_the_file(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.json", "tokenizer.json"]
    assert loaded.encode_document(TEXT) == trained.encode_document(TEXT)
    # The library itself reads it and agrees.
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [0] + library.encode(TEXT, add_special_tokens=False).ids + [1] == trained.encode_document(TEXT)
    assert library.decode(trained.encode_document(TEXT)) == TEXT


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    parts = [stream.push(i) for i in ids]
    return parts + [stream.finish()]


def byte_ids(tokenizer, data):
    by_piece = {piece: i for i, piece in enumerate(tokenizer._pieces)}
    return [by_piece[bytes([b])] for b in data]


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (1, 1, 1, 1)])
def test_an_emoji_over_several_tokens_is_streamed_whole(cuts):
    """D13: the joined stream equals decode of all and holds no U+FFFD, however the four bytes are cut into tokens."""
    alphabet = {b: c for c, b in module.byte_of_character().items()}
    emoji = "🎉".encode()
    ends = np.cumsum(cuts)
    parts = ["".join(alphabet[b] for b in emoji[end - cut : end]) for cut, end in zip(cuts, ends)]
    vocabulary = {BOS: 0, EOS: 1, "a": 2} | {part: 3 + i for i, part in enumerate(dict.fromkeys(parts))}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(library.to_str(), "test")
    ids = [0, 2] + [vocabulary[part] for part in parts] + [2, 1]
    chunks = streamed(tokenizer, ids)
    assert "".join(chunks) == tokenizer.decode(ids) == library.decode([i for i in ids if i > 1]) == "a🎉a"
    assert chunks[2 : 2 + len(parts)] == [""] * (len(parts) - 1) + ["🎉"]


def test_a_stream_that_ends_inside_a_character_shows_no_broken_one(trained):
    ids = byte_ids(trained, "né🎉".encode()[:-1])
    assert streamed(trained, ids)[-1] == ""
    assert "".join(streamed(trained, ids)) == trained.decode(ids) == "né"


def test_a_stream_of_random_ids_equals_decoding_them_all(trained):
    """The right value is Python's own decoder on all bytes; the unfinished end is left out."""
    draw = random.Random(0)
    single = byte_ids(trained, bytes(range(256)))
    for _ in range(300):
        ids = [draw.choice(single) if draw.random() < 0.8 else draw.randrange(trained.vocab_size) for _ in range(12)]
        text = "".join(streamed(trained, ids))
        assert text == trained.decode(ids)
        whole = b"".join(trained._pieces[i] for i in ids).decode("utf-8", "replace")
        assert whole in (text, text + "\ufffd")


def test_long_texts_are_encoded_in_pieces_that_join_to_the_text(trained, monkeypatch):
    assert ["ab\n", "cd\ne", "f"] != list(text_pieces("ab\ncd\nef", 4)) == ["ab\n", "cd\n", "ef"]
    assert list(text_pieces("abcdefgh", 3)) == ["abc", "def", "gh"] and list(text_pieces("", 3)) == [""]
    monkeypatch.setattr(module.text_pieces, "__defaults__", (50,))
    ids = trained.encode_document(TEXT)
    assert trained.decode(ids) == TEXT and ids.count(0) == ids.count(1) == 1


def byte_level(specials, extra=(), ids=None):
    """A foreign byte-level tokenizer: 256 bytes, then the named tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(specials))
    library.add_tokens(list(extra))
    return library


@pytest.mark.parametrize(
    "names, marks",
    [
        ((BOS, EOS, PAD), (256, 257, 258)),
        (("<s>", "</s>"), (256, 257, 257)),
        (("<|begin_of_text|>", "<|end_of_text|>", "<pad>"), (256, 257, 258)),
        (("[PAD]", "[EOS]", "[BOS]"), (258, 257, 256)),
        (("<|endoftext|>",), (256, 256, 256)),
        (("<s>", "</s>", BOS, EOS), (258, 259, 259)),
        ((EOS, "<s>", "</s>"), (257, 258, 258)),
    ],
)
def test_the_marks_of_foreign_tokenizers_are_found(names, marks):
    tokenizer = Tokenizer(byte_level(names).to_str(), "test")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == marks
    assert tokenizer.vocab_size == 256 + len(names)
    ids = tokenizer.encode_document(f"a{names[0]}b")
    assert ids[0] == marks[0] and ids[-1] == marks[1] and max(ids[1:-1]) < 256
    assert tokenizer.decode(ids) == f"a{names[0]}b"


def test_a_post_processor_a_truncation_and_a_padding_in_the_file_change_nothing():
    """D05: no second begin mark, no document cut short."""
    library = byte_level(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 256), ("</s>", 257)])
    library.enable_truncation(5)
    library.enable_padding(length=40, pad_id=257, pad_token="</s>")
    tokenizer = Tokenizer(library.to_str(), "test")
    ids = tokenizer.encode_document("abcdefghij")
    assert ids[0] == 256 and ids[-1] == 257 and len(ids) == 12 and ids.count(256) == ids.count(257) == 1
    assert len(tokenizer.encode_prompt("abcdefghij")) == 11


def test_control_tokens_that_a_file_does_not_call_special_are_no_boundaries_either():
    """DeepSeek's own file marks `<｜User｜>` as not special; ordinary added words such as runs of spaces stay tokens."""
    library = byte_level([BOS, EOS], ["<｜User｜>", "<｜fim▁hole｜>", "    ", "hello"])
    tokenizer = Tokenizer(library.to_str(), "test")
    ids = tokenizer.encode_document("<｜User｜><｜fim▁hole｜>    hello")
    assert ids[-3:-1] == [260, 261] and max(ids[1:-3]) < 256
    assert tokenizer.decode(ids) == "<｜User｜><｜fim▁hole｜>    hello"
    assert tokenizer.token_bytes()[256:].tolist() == [0, 0, 0, 0, 4, 5]
    assert tokenizer.encode_prompt("<｜User｜>") == [256, 258]


def test_the_vocabulary_counts_holes_and_added_tokens():
    """D01: ids beyond the base vocabulary count; the size is the largest id plus one."""
    parsed = json.loads(byte_level(["<s>", "</s>"]).to_str())
    parsed["added_tokens"][1]["id"] = 300
    parsed["model"]["vocab"]["</s>"] = 300
    tokenizer = Tokenizer(json.dumps(parsed), "test")
    assert tokenizer.vocab_size == 301 and tokenizer.eos_id == 300
    assert tokenizer.token_bytes().shape == (301,) and tokenizer.token_bytes()[270] == 0


def test_a_sentencepiece_style_tokenizer_gives_text_back():
    """Llama 2's layout: a space is put before the text, unknown characters fall back to bytes."""
    single = {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | single | {"▁": 259, "a": 260, "▁a": 261}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(library.to_str(), "test")
    ids = tokenizer.encode_document("a a🎉 b")
    assert ids[:3] == [1, 261, 261]
    assert tokenizer.decode(ids) == library.decode(ids) == "".join(streamed(tokenizer, ids)) == "a a🎉 b"
    assert tokenizer.token_bytes()[[1, 3 + 0xF0, 259, 261]].tolist() == [0, 1, 1, 2]


def test_unusable_tokenizers_are_refused_in_one_line(tmp_path):
    lossy = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "word": 2}, unk_token="<s>"))
    cases = {
        "missing.json": (None, "cannot read"),
        "broken.json": ("{", "not a tokenizer.json"),
        "other.json": ('{"a": 1}', "not a tokenizer.json"),
        "list.json": ("[]", "not a tokenizer.json"),
        "nomarks.json": (byte_level(["<x>"]).to_str(), "<s> and </s>"),
        "lossy.json": (lossy.to_str(), "WordLevel"),
    }
    for name, (content, words) in cases.items():
        if content is not None:
            (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(InputError) as error:
            Tokenizer.load(tmp_path / name)
        assert words in str(error.value) and name in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(InputError, match="264 is the least"):
        Tokenizer.train(["a"], 263)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        Tokenizer.load(tmp_path / "binary.json")


def test_training_on_little_text_gives_fewer_tokens():
    """No pair occurs twice: 8 special tokens and 256 bytes remain."""
    assert Tokenizer.train(["ab"], 1000).vocab_size == 264


def test_endless_words_are_cut_for_training_and_other_texts_are_not():
    genome = "ACGT" * 5000
    assert "".join(short_words(f"a\n{genome}\n{' ' * 20000}")) == f"a\n{genome}\n{' ' * 20000}"
    assert max(map(len, short_words(genome))) == 8192 and list(short_words(TEXT)) == [TEXT]
    tokenizer = Tokenizer.train([genome], 300)
    assert tokenizer.decode(tokenizer.encode_document(genome)) == genome
