"""What `bench_decode.py` compares: functions that continue prompts greedily and say how long it took.

Each takes prompts of one length and the number of new tokens, and gives texts; seconds until the first token of each
(`prefill`) and for the others (`seconds`); passes of the main model behind the prompt (`passes`), counted once for the
batch, and for every sequence that was going on (`steps`); accepted drafts.
"""

import itertools
import sys
import time
from pathlib import Path

import torch
import transformers

from dstrain.checkpoint.hf_export import export_folder
from dstrain.config.schema import ExportConfig
from dstrain.inference.generation import Generation, Sampling
from dstrain.inference.load import load_weights
from dstrain.parallel.dispatch import LocalDispatcher

# transformers' third kind of experts, batched_mm, copies the weights of every token's experts: minutes for a prompt.
SETTINGS = list(itertools.product(("sdpa", "eager"), ("grouped_mm", "eager")))


def ours(checkpoint: str, precision: str, drafts: int, compiled: bool):
    """dstrain's own loop; nothing ends a text but its length."""
    model, _, _ = load_weights(checkpoint, precision, torch.device("cpu"), print, compiled=compiled)

    def go_on(prompts: list[list[int]], new: int) -> dict:
        begin = time.perf_counter()
        generation = Generation(model, LocalDispatcher(), prompts, new, Sampling([0.0] * len(prompts)), drafts)
        rounds = generation.rounds()
        texts = next(rounds)
        middle, passes = time.perf_counter(), 0
        for fresh in rounds:
            passes += 1
            for text, ids in zip(texts, fresh):
                text += ids
        end = time.perf_counter()
        return {
            "prefill": middle - begin, "seconds": end - middle, "passes": passes, "texts": texts,
            "steps": generation.steps, "accepted": sum(generation.accepted),
        }

    return go_on


class Clock(transformers.LogitsProcessor):
    """Called with the logits of every step; changes none."""

    def __call__(self, ids, scores):
        self.times.append(time.perf_counter())
        return scores


def fastest_peer(checkpoint: str, folder: Path, precision: str, warm_up: list[list[int]]):
    """transformers' `generate` on the checkpoint's export, in the setting that decodes fastest here."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    export = folder / f"export-{precision}"
    if not export.exists():
        export_folder(ExportConfig(checkpoint, str(export), precision))

    def build(attention: str, experts: str):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            export, dtype=torch.float32 if precision == "fp32" else torch.bfloat16, attn_implementation=attention,
            experts_implementation=experts,
        ).eval()
        keys = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        clock = Clock()

        def go_on(prompts: list[list[int]], new: int) -> dict:
            ids, clock.times = torch.tensor(prompts), [time.perf_counter()]
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, logits_processor=[clock], **keys
            )
            begin, first, end = *clock.times[:2], time.perf_counter()
            return {
                "prefill": first - begin, "seconds": end - first, "texts": out[:, ids.shape[1] :].tolist(),
                "passes": new - 1, "steps": (new - 1) * len(prompts), "accepted": 0,
            }

        return go_on

    best = None
    for setting in SETTINGS:
        go_on = build(*setting)
        go_on(warm_up, 2)
        seconds = min(go_on(warm_up, 16)["seconds"] for _ in range(2))
        print(f"transformers {precision} batch {len(warm_up)} {setting}: {seconds / 15 * 1e3:.1f} ms a step", file=sys.stderr)
        if best is None or seconds < best[0]:
            best = seconds, setting, go_on
    _, (attention, experts), go_on = best
    return f"{attention} attention, {experts} experts", go_on
