"""What a run reads: its corpus and tokenizer, the training samples and the held-out windows, checked against the model."""

import torch

from dstrain.config.errors import InputError
from dstrain.config.schema import DataConfig, ModelConfig, TrainConfig
from dstrain.data.corpus import Corpus, open_corpus
from dstrain.data.indexed import IndexedDataset
from dstrain.data.mixture import Mixture, open_stream
from dstrain.data.samples import EvalWindows, SampleStream, check_ids
from dstrain.data.tokenizer import Tokenizer


def open_data(config: TrainConfig, data: DataConfig) -> tuple[Corpus, Tokenizer, "Checked", "Checked | None"]:
    """The corpus of `data`, which is built, its tokenizer, the training samples and the held-out windows."""
    corpus = open_corpus(data)
    tokenizer = Tokenizer.load(corpus.tokenizer)
    check_tokenizer(tokenizer, corpus, config.model)
    depth, length = config.model.num_nextn_predict_layers, config.data.sequence_length
    check_length(config, corpus, length + 1 + depth)
    stream, windows = Checked(open_stream(config, corpus, tokenizer), config.model, corpus.train), None
    if corpus.heldout:
        windows = Checked(EvalWindows(IndexedDataset(corpus.heldout), length, depth), config.model, corpus.heldout)
    return corpus, tokenizer, stream, windows


class Checked:
    """Samples whose ids are known to lie inside the model's vocabulary."""

    def __init__(self, samples: SampleStream | Mixture | EvalWindows, model: ModelConfig, where: str):
        self.samples, self.vocab_size, self.where = samples, model.vocab_size, where

    def __len__(self) -> int:
        return len(self.samples)

    def metrics(self, samples: int) -> dict:
        return self.samples.metrics(samples)

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, documents = self.samples.batch(first, count)
        check_ids(tokens, self.vocab_size, self.where, first)
        return tokens, documents


def check_length(config: TrainConfig, corpus: Corpus, needed: int) -> None:
    """InputError that names the user's text where it is shorter than one sample."""
    if corpus.train_tokens < needed:
        source = f"data.train={config.data.train}" if config.data.train else f"data.text={config.data.text}"
        if config.data.sources is not None:
            source = "data.sources"
        raise InputError(
            f"{source}: {corpus.train_tokens} training tokens, one sample needs {needed} (data.sequence_length="
            f"{config.data.sequence_length} + 1 + MTP depth); give more text or a shorter sequence"
        )


def check_tokenizer(tokenizer: Tokenizer, corpus: Corpus, model: ModelConfig) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"tokenizer {corpus.tokenizer} has {tokenizer.vocab_size} ids, model.vocab_size is {model.vocab_size}; "
            f"valid: model.vocab_size of at least {tokenizer.vocab_size}"
        )
