"""`dstrain generate`: continue a prompt, streamed to standard output; everything else goes to standard error."""

import io
import os
import sys

from dstrain.config.errors import InputError
from dstrain.config.schema import GenerateConfig
from dstrain.inference.generation import Generation, Sampling
from dstrain.inference.load import Loaded, load_model
from dstrain.parallel.device import pick_device
from dstrain.parallel.dispatch import LocalDispatcher


def generate(config: GenerateConfig) -> int:
    """Print the continuation of the prompt. -> the exit code."""
    if sys.stdout is None:  # closed by whoever started us
        raise InputError("standard output is closed: the text has nowhere to go")
    if isinstance(sys.stdout, io.TextIOWrapper):  # as the prompt is read, whatever the locale
        sys.stdout.reconfigure(encoding="utf-8")
    prompt = read_prompt(config)
    device = pick_device(config.device, "device")
    loaded = load_model(config.checkpoint, config.precision, device, _report, config.weights, config.compile)
    depth = loaded.config.model.num_nextn_predict_layers
    if config.drafts > depth:
        raise InputError(f"drafts={config.drafts}: the checkpoint has {depth} MTP modules; valid: 0 to {depth}")
    ids = loaded.tokenizer.encode_prompt(prompt)
    context = loaded.config.model.max_position_embeddings
    if len(ids) >= context:
        raise InputError(
            f"the prompt has {len(ids)} tokens with its begin mark, the model's context is {context}; "
            f"valid: at most {context - 1}"
        )
    limit = min(config.max_tokens, context - len(ids))
    if limit < config.max_tokens:
        _report(f"max_tokens={config.max_tokens} is more than the context leaves: stopping after {limit}")
    stream = loaded.tokenizer.stream()
    try:
        if config.echo:
            _write(prompt)
        generation = continuation(loaded, ids, limit, config)
        for (tokens,) in generation.rounds():
            _write("".join(map(stream.push, tokens)))
        _write(stream.finish() + "\n")
        if config.drafts:
            _report(acceptance(generation))
    except BrokenPipeError:  # the reader has seen enough; keep Python from complaining when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def continuation(loaded: Loaded, ids: list[int], limit: int, config: GenerateConfig) -> Generation:
    """At most `limit` ids after the prompt `ids`, ending before the end mark."""
    sampling = Sampling(
        [config.temperature], config.top_p, config.top_k, config.seed, loaded.tokenizer.vocab_size, loaded.tokenizer.eos_id
    )
    return Generation(loaded.model, LocalDispatcher(), [ids], limit, sampling, config.drafts)


def acceptance(generation: Generation) -> str:
    """How many drafts were accepted."""
    steps, accepted = generation.steps, generation.accepted
    if not steps:
        return "drafts: none were needed"
    depths = ", ".join(f"{count / steps:.0%}" for count in accepted)
    return (
        f"drafts: {sum(accepted)} of {steps * len(accepted)} accepted (by depth {depths}), "
        f"{1 + sum(accepted) / steps:.2f} tokens a step of the main model"
    )


def read_prompt(config: GenerateConfig) -> str:
    """The prompt given, or all of standard input without its last line end."""
    if config.prompt is not None:
        return config.prompt
    if sys.stdin is None or sys.stdin.isatty():  # None: closed by whoever started us
        raise InputError("no prompt: give prompt='...' or pipe text in")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on standard input is not UTF-8 (byte {error.start})") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(line: str) -> None:
    print(f"dstrain: {line}", file=sys.stderr)
