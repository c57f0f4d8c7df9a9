"""The tokenizer: byte-level BPE trained here with DeepSeek's special tokens, or any lossless `tokenizer.json`.

Every id stands for a fixed string of bytes, which is empty for control tokens (`<｜begin▁of▁sentence｜>` and its like).
Decoding joins these bytes, so streaming needs no look-back and bits per byte are exact. Documents are data: text in
them that spells a control token stays text. Prompts are the user's: there control tokens are parsed.
"""

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dstrain.config.errors import InputError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜User｜>", "<｜Assistant｜>"]

# Names under which other tokenizers carry the same roles, tried in this order.
DOCUMENT_MARKS = [
    (BOS, EOS),
    ("<s>", "</s>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<bos>", "<eos>"),
    ("[BOS]", "[EOS]"),
    ("<|endoftext|>", "<|endoftext|>"),
]
PADS = [PAD, "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"]

# Begin, hole and end of fill-in-the-middle: before the prefix, the suffix and the middle.
FIM_MARKS = [
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
]

# Words with the space, dot or bracket before them; up to three digits; punctuation; a line end with the next line's
# indentation, so that "def f():" alone, the usual prompt, is cut as it is inside a file; other white space.
PIECES = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n[ \t]*|\s+(?!\S)|\s+"

CONTROL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # how the name of an added token looks that is no ordinary text
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Longer texts are encoded in parts: the library needs some hundred bytes of memory a character.
PIECE_CHARACTERS = 1 << 20
# A word's time in training grows with the square of its length, and a genome or a ruler line can be one word.
LONG_WORD = re.compile(r"\S{8192}(?=\S)|\s{8192}(?=\s)")


def check_vocab_size(vocab_size: int) -> None:
    """InputError if a tokenizer of this size cannot be trained."""
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise InputError(f"data.vocab_size={vocab_size}: {smallest} is the least (special tokens and 256 bytes)")


def text_pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text after line ends into pieces of about `size` characters; joined they are the text."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        end = end if end > start else start + size  # one endless line
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def short_words(text: str) -> Iterator[str]:
    """Cut a text inside words of thousands of characters; joined the pieces are the text."""
    start = 0
    for found in LONG_WORD.finditer(text):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def byte_of_character() -> dict[str, int]:
    """Inverse of byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for 256, 257, …"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class Stream:
    """Ids in, text out, a piece at a time; only whole characters leave it. Made by `Tokenizer.stream()`."""

    def __init__(self, pieces: list[bytes], leading_space: bool):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = leading_space

    def push(self, token: int) -> str:
        """The text that this id completes; often empty in the middle of a character."""
        text = self._decoder.decode(self._pieces[token])
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """The rest of the text. A character that was never completed is left out, as `decode` does."""
        self._decoder.reset()
        return ""


class Tokenizer:
    """Text to ids and back. Ids are Python ints or int64; `vocab_size` is the largest id plus one."""

    def __init__(self, definition: str, where: str):
        """`definition` is the text of a tokenizer.json, `where` its name in error messages."""
        self._definition = definition
        try:
            parsed = json.loads(definition)
            self._prompts = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{where}: not a tokenizer.json ({' '.join(str(error).split())})") from None
        added = parsed.get("added_tokens") or []
        control = {t["content"] for t in added if t["special"] or CONTROL.fullmatch(t["content"])}
        # Files differ in which control tokens they call special (DeepSeek's own leaves out `<｜User｜>`); in a document
        # none may be parsed, so here all are special, and special text is then encoded like any other.
        documents = parsed | {"added_tokens": [t | {"special": t["content"] in control} for t in added]}
        self._documents = tokenizers.Tokenizer.from_str(json.dumps(documents))
        self._documents.encode_special_tokens = True
        for library in (self._prompts, self._documents):
            library.no_truncation()
            library.no_padding()

        vocabulary = self._prompts.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        marks = next(((b, e) for b, e in DOCUMENT_MARKS if b in vocabulary and e in vocabulary), None)
        if marks is None:
            names = ", ".join(f"{b} and {e}" if b != e else b for b, e in DOCUMENT_MARKS)
            raise InputError(f"{where}: no tokens for a document's begin and end; one of these is needed: {names}")
        self.bos_id, self.eos_id = vocabulary[marks[0]], vocabulary[marks[1]]
        self.pad_id = next((vocabulary[name] for name in PADS if name in vocabulary), self.eos_id)
        self._vocabulary, self._where = vocabulary, where
        self._leading_space = _strips_leading_space(parsed)
        self._pieces = _bytes_of_ids(parsed, vocabulary, {t["content"] for t in added}, control | set(marks), where)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json; InputError if it is missing, broken, or no lossless kind."""
        try:
            definition = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InputError(f"{path}: cannot read a tokenizer.json there: {reason}") from None
        return cls(definition, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Byte-level BPE over `texts`: the special tokens are ids 0 … 7, then the 256 bytes, then merges.

        The same texts give the same tokenizer. Little text may give fewer than `vocab_size` tokens.
        """
        check_vocab_size(vocab_size)
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        pieces = (piece for text in texts for part in text_pieces(text) for piece in short_words(part))
        library.train_from_iterator(pieces, trainer)
        return cls(library.to_str(), "trained tokenizer")

    def save(self, path: str | Path) -> None:
        """Write the tokenizer.json that this tokenizer was made from; the file appears complete or not at all."""
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_text(self._definition, encoding="utf-8")
        os.replace(temporary, path)

    def fim_ids(self) -> tuple[int, int, int]:
        """Ids of the marks before prefix, suffix and middle; InputError naming them where the tokenizer has none."""
        marks = next((marks for marks in FIM_MARKS if all(mark in self._vocabulary for mark in marks)), None)
        if marks is None:
            names = "; ".join(" ".join(marks) for marks in FIM_MARKS)
            raise InputError(
                f"{self._where}: no tokens for fill-in-the-middle, one of these triples is needed: {names}"
            )
        begin, hole, end = (self._vocabulary[mark] for mark in marks)
        return begin, hole, end

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """`[bos] + ids + [eos]` of each text, in parallel; whatever a text spells, it holds no control token."""
        pieces = [list(text_pieces(text)) for text in texts]
        encoded = iter(self._documents.encode_batch_fast([p for ps in pieces for p in ps], add_special_tokens=False))
        documents = []
        for ps in pieces:
            ids = [self.bos_id]
            for _ in ps:
                ids += next(encoded).ids
            documents.append(ids + [self.eos_id])
        return documents

    def encode_document(self, text: str) -> list[int]:
        """`[bos] + ids + [eos]` of one text."""
        return self.encode_documents([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """`[bos] + ids`; control tokens spelled in the prompt are parsed."""
        return [self.bos_id] + self._prompts.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without control tokens.

        Bytes that are no UTF-8 show as U+FFFD, except those of an unfinished last character, which is left out.
        """
        stream = self.stream()
        return "".join([stream.push(int(i)) for i in ids]) + stream.finish()

    def stream(self) -> Stream:
        """A new incremental decoder."""
        return Stream(self._pieces, self._leading_space)

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of text that each id stands for, int64 [vocab_size]; 0 for control tokens and unused ids."""
        return np.array([len(piece) for piece in self._pieces], np.int64)


def _parts(component: dict | None) -> list[dict]:
    """A component of a tokenizer.json as a flat list: sequences are opened."""
    if component is None:
        return []
    inner = next((component[key] for key in ("decoders", "pretokenizers", "normalizers") if key in component), None)
    return [component] if inner is None else [part for child in inner for part in _parts(child)]


def _strips_leading_space(parsed: dict) -> bool:
    """SentencePiece styles put a space before the text and take it away when decoding."""
    for part in _parts(parsed.get("decoder")):
        if part["type"] == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part["type"] == "Metaspace" and part.get("prepend_scheme") != "never":
            return True
    return False


def _bytes_of_ids(
    parsed: dict, vocabulary: dict[str, int], added: set[str], control: set[str], where: str
) -> list[bytes]:
    """The bytes that each id stands for; b"" for control tokens and for ids that no token has."""
    kinds = {part["type"] for part in _parts(parsed.get("decoder")) + _parts(parsed.get("pre_tokenizer"))}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"Metaspace", "ByteFallback"}:
        raise InputError(
            f"{where}: a {parsed['model'].get('type')} tokenizer whose ids do not give the text back; "
            "byte-level BPE or a SentencePiece kind (Metaspace, ByteFallback) is needed"
        )
    alphabet = byte_of_character()
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if token in control:
            continue
        if token in added:
            pieces[i] = token.encode()
        elif byte_level:
            unknown = next((c for c in token if c not in alphabet), None)
            if unknown is not None:
                raise InputError(f"{where}: token {i} {token!r} holds {unknown!r}, outside byte-level BPE's alphabet")
            pieces[i] = bytes(alphabet[c] for c in token)
        elif match := BYTE_TOKEN.fullmatch(token):
            pieces[i] = bytes([int(match[1], 16)])
        else:
            pieces[i] = token.replace("▁", " ").encode()
    return pieces
