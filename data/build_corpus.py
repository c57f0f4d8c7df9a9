"""Builds a corpus, or opens it when it is there, and says what it holds.

    python data/build_corpus.py                                  the Python standard library's sources
    python data/build_corpus.py text=PATH pattern='*.txt' vocab_size=8192

Keys are those of the `data` group: text, pattern, train, heldout, tokenizer, vocab_size, cache.
"""

import sys

from dstrain.config.errors import InputError, nearest
from dstrain.config.schema import DataConfig
from dstrain.data.corpus import Corpus, open_corpus

KEYS = ("text", "pattern", "train", "heldout", "tokenizer", "vocab_size", "cache")


def parse(arguments: list[str]) -> DataConfig:
    """`key=value` arguments as a data configuration."""
    values = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        key = key.removeprefix("data.")
        if not equals or key not in KEYS:
            raise InputError(f"{argument!r}: expected key=value{nearest(key, KEYS)}")
        values[key] = value
    if "vocab_size" in values:
        if not values["vocab_size"].isdecimal():
            raise InputError(f"vocab_size={values['vocab_size']}: a whole number is needed")
        values["vocab_size"] = int(values["vocab_size"])
    return DataConfig(sequence_length=1, **values)  # a corpus does not depend on the sequence length


def describe(corpus: Corpus) -> str:
    """The corpus in a few lines of text."""

    def line(label: str, documents: int, tokens: int, size: int | None) -> str:
        text = f", {size:,} bytes, {size / tokens:.3f} bytes per token" if size else ""
        return f"{label:<10}{documents:,} documents, {tokens:,} tokens{text}"

    lines = [
        f"corpus    {corpus.folder or corpus.train}",
        line("train", corpus.train_documents, corpus.train_tokens, corpus.train_bytes),
    ]
    if corpus.heldout is not None:
        lines.append(line("held out", corpus.heldout_documents, corpus.heldout_tokens, corpus.heldout_bytes))
    if corpus.gzip_bits_per_byte is not None:
        lines.append(
            f"held-out bits per byte: gzip -9 {corpus.gzip_bits_per_byte:.3f}, xz -9 {corpus.xz_bits_per_byte:.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__.strip())
        sys.exit(0)
    try:
        print(describe(open_corpus(parse(sys.argv[1:]))))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
