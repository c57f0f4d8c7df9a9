"""Moonlight's tiktoken.model as a tokenizer.json: equal ids.

Right values: tiktoken's rule written out below, over a vocabulary made here (the released file is not needed), and the
tiktoken library itself where it is installed.
"""

import base64
import json
import random

import pytest
import regex
import tokenizers

from dstrain.checkpoint.hf_tokenizer import MOONSHOT_PIECES, convert_tiktoken, read_tokenizer_files
from dstrain.config.errors import InputError
from dstrain.data.tokenizer import Tokenizer

TEXT = """def Fibonacci(n):\n    return n if n < 2 else fibonacci(n-1)  +  fibonacci(n - 2)  # it's, WE'LL, 12345 6\r\n
中文English混合 汉字abc 北京市Pascal的人, 日本語のテキスト 한국어 naïve Ünïcödé ßtraße ΑΒΓαβγ Ǆ ǅ 1234567 ½ ٣٤٥ é\u0301 🙂👩‍👩‍👧 aaaaaaaaaaaaaaa
\t\tx=[1,2,3];;  \n\n\n   trailing   \n"""
NAMES = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "[PAD]": 7}  # behind the text tokens


def pieces(text: str) -> list[str]:
    """The pattern by the `regex` module, whose set difference is `--` and not `&&[^…]`."""
    return regex.findall(MOONSHOT_PIECES.replace(r"&&[^\p{Han}]]", r"--\p{Han}]"), text, regex.V1)


def merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule: a piece that is a token is taken whole; else the first pair of the lowest rank is joined, again
    and again."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        joined = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture(scope="module")
def ranks():
    """Byte-pair ranks learned from TEXT and its lines in another order, as tiktoken's are."""
    learned = {bytes([byte]): byte for byte in random.Random(1).sample(range(256), 256)}
    words = [[bytes([byte]) for byte in piece.encode()] for piece in pieces(TEXT)]
    while len(learned) < 500:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        learned[b"".join(best)] = len(learned)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [b"".join(best)]
                i += 1
    assert len(learned) > 320
    learned[b"Zwq"] = len(learned)  # no merges lead to it: only a piece that is just this gives it
    return learned


@pytest.fixture
def folder(ranks, tmp_path):
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    decoder = {str(len(ranks) + i): {"content": name, "special": True} for name, i in NAMES.items()}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder, "chat_template": "{{ x }}",
              "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_equal_tiktokens_rule(folder, ranks):
    files = convert_tiktoken(folder, len(ranks) + 8)
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    assert library.get_vocab_size() == len(ranks) + 8
    draw = random.Random(2)
    texts = [TEXT, "a" * 37, "Zwq", "Zwqq Zwq"] + ["".join(draw.choices(TEXT, k=60)) for _ in range(300)]
    for text in texts:
        expected = [i for piece in pieces(text) for i in merge(piece.encode(), ranks)]
        assert "".join(pieces(text)) == text
        assert library.encode(text).ids == expected
    used = Tokenizer(files["tokenizer.json"].decode(), "test")
    assert (used.bos_id, used.eos_id) == (len(ranks), len(ranks) + 1)
    assert used.encode_prompt("x<|im_end|>") == [len(ranks), ranks[b"x"], len(ranks) + 2]
    assert used.decode(used.encode_document(TEXT)) == TEXT
    kept = json.loads(files["tokenizer_config.json"])
    assert kept == {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ x }}"}


def test_ids_equal_the_tiktoken_library(folder, ranks):
    tiktoken = pytest.importorskip("tiktoken")
    theirs = tiktoken.Encoding(
        "made here", pat_str=MOONSHOT_PIECES, mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for name, i in NAMES.items()},
    )
    library = tokenizers.Tokenizer.from_str(convert_tiktoken(folder, len(ranks) + 8)["tokenizer.json"].decode())
    draw = random.Random(3)
    for text in [TEXT, "a" * 400, "Zwq", "Zwqq Zwq"] + ["".join(draw.choices(TEXT, k=60)) for _ in range(2000)]:
        assert library.encode(text).ids == theirs.encode(text, allowed_special="all")


def test_what_cannot_be_converted_faithfully_is_refused_in_one_line(folder, ranks):
    code = 'class TikTokenTokenizer:\n    pat_str = "|".join([r"\\p{N}{1,3}", r"\\s+"])\n'
    (folder / "tokenization_moonshot.py").write_text(code)
    with pytest.raises(InputError, match="another pattern"):
        read_tokenizer_files(folder, 600)
    parts = ",\n".join(f'r"""{part}"""' for part in split_pattern())
    (folder / "tokenization_moonshot.py").write_text(f'class T:\n    pat_str = "|".join([{parts}])\n')
    assert "tokenizer.json" in read_tokenizer_files(folder, 600)
    with pytest.raises(InputError, match="vocab_size"):
        read_tokenizer_files(folder, len(ranks) - 1)
    (folder / "tiktoken.model").write_bytes(b"AA== 0\nnonsense\n")
    with pytest.raises(InputError, match="line 2"):
        read_tokenizer_files(folder, 600)
    (folder / "tiktoken.model").write_bytes(b"AA== 0\n")
    with pytest.raises(InputError, match="every single byte"):
        read_tokenizer_files(folder, 600)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "OtherTokenizer"}')
    with pytest.raises(InputError, match="OtherTokenizer"):
        read_tokenizer_files(folder, 600)


def split_pattern() -> list[str]:
    """The alternatives of the pattern, as the released code lists them: cut at the bars outside brackets."""
    parts, depth = [""], 0
    for character in MOONSHOT_PIECES:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    assert len(parts) == 8
    return parts
