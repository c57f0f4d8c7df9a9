"""Loss parity of FP8 and BF16: the same model, seed and data in four runs, and the gaps between their losses.

    python tools/fp8_parity.py                          # every run that is missing or unfinished, then the table
    python tools/fp8_parity.py runs=fp8 threads=1       # one run; others may be started apart, at the same time or later
    python tools/fp8_parity.py runs=none                # the table of what is there
    python tools/fp8_parity.py steps=30 last=10 dir=runs/parity-try

    bf16        the reference
    bf16_micro  differs from it only in the micro-batch size, so only in rounding: what the experiment can resolve
    fp8         emulated, power-of-two scales
    control     fp8 in which the last bit of every E4M3 code is cleared: what the experiment must be able to see

gap = |mean of a run's loss_main - mean of bf16's| / mean of bf16's, over the last steps. Each is an ordinary
`dstrain train` run in the folder and continues where it stopped. Writes table and curve beside the runs, or to out=.
"""

import json
import multiprocessing
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DEFAULTS = {
    "runs": "bf16,bf16_micro,fp8,control", "dir": "runs/fp8_parity", "model": "small", "steps": "1500", "last": "300",
    "sequence": "128", "batch": "4", "learning_rate": "2.0e-4", "threads": "2", "compile": "true", "out": "",
}
RUNS = {
    "bf16": ["precision=bf16"],
    "bf16_micro": ["precision=bf16"],
    "fp8": ["precision=fp8"],
    "control": ["precision=fp8"],
}
LIMITS = {"bf16_micro": ("at most", 0.1), "fp8": ("at most", 0.25), "control": ("above", 0.25)}  # percent
WINDOW, WIDTH = 50, 760  # steps of a mean in the picture; pixels
COLOURS = {"bf16": "#1b6ca8", "bf16_micro": "#7fb7de", "fp8": "#d1495b", "control": "#8d8d8d"}


def main() -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}")
    wanted = [name for name in options["runs"].split(",") if name != "none"]
    if unknown := set(wanted) - set(RUNS):
        sys.exit(f"unknown run {unknown.pop()!r}; valid: {', '.join(RUNS)} or none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for name in wanted:
        if code := run_apart(name, options):
            sys.exit(f"{name}: ended with {code}")
    losses = {name: found for name in RUNS if (found := read_losses(name, options))}
    summary = compare(losses, options)
    text = table(losses, summary, options)
    print(text)
    base = Path(options["out"] or Path(options["dir"]) / "parity")
    base.with_suffix(".md").write_text(text + "\n")
    base.with_suffix(".svg").write_text(curve(losses))
    print(json.dumps(summary))


def run_apart(name: str, options: dict) -> int | None:
    """One run in a process of its own, where the control changes the number format. -> its exit code.

    A run does not outlive its caller: it saves and ends as it would itself.
    """
    process = multiprocessing.get_context("spawn").Process(target=train, args=(name, options))
    process.start()
    try:
        process.join()
    except SystemExit:
        process.terminate()
        process.join()
        raise
    return process.exitcode


def overrides(name: str, options: dict) -> list[str]:
    """The `dstrain train` command line of a run."""
    steps, sequence, batch = (int(options[key]) for key in ("steps", "sequence", "batch"))
    peak = float(options["learning_rate"])
    # The shape of schedule=short, calmer, so that runs that differ in nothing but rounding stay together. With 2e-3 and a
    # bias_speed of 0.001 every token goes to the same experts for the first 60 steps, gradients jump to ten times their
    # size, and such runs part for good: their losses stay some tenths of a percent apart. With a bias_speed of 0.02 a
    # single token that changes its expert moves dozens of others a step later.
    rate = f"{{until:20%,value:{peak},shape:linear}},{{until:40%,value:{peak}}},{{until:100%,value:{peak / 10},shape:cosine}}"
    bias = "{until:20%,value:0.004},{until:97%,value:0.001},{until:100%,value:0.0}"
    micro = batch // 2 if name == "bf16_micro" else batch
    return [
        *RUNS[name], f"model={options['model']}", f"run.name={name}", f"run.dir={options['dir']}", f"run.steps={steps}",
        f"run.threads={options['threads']}", f"run.compile={options['compile']}", f"data.sequence_length={sequence}",
        f"batch.sequences={batch}", f"batch.micro_sequences={micro}", f"schedule.tokens={steps * sequence * batch}",
        f"schedule.learning_rate=[{rate}]", f"schedule.bias_speed=[{bias}]",
        "eval.every=0", "eval.at_end=false", "checkpoint.every=250", "checkpoint.keep=2", "telemetry.log_every=50",
    ]


def train(name: str, options: dict) -> None:
    """The process of one run."""
    from dstrain.cli import main as dstrain

    if name == "control":
        take_a_mantissa_bit()
    sys.exit(dstrain(["train", *overrides(name, options)]))


def take_a_mantissa_bit() -> None:
    """From now on every E4M3 number of this process, rounded as ever, loses the last bit of its mantissa: it is cleared."""
    import torch

    from dstrain.precision import fp8_blocks, fp8_scales, fp8_tiles

    def to_e4m2(values, scale):
        quotient = values / scale
        bits = quotient.view(torch.int32)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 21 << 21  # to E4M3 by nearest even, then without its last bit
        subnormal = ((quotient * 512).round() / 2).trunc() / 256  # below 2^-6: steps of 2^-9, then of 2^-8
        taken = torch.where(quotient.abs() < 2.0**-6, subnormal, normal.view(torch.float32))
        return torch.where(scale == scale, taken, torch.nan).to(fp8_scales.FP8)

    fp8_tiles.to_e4m3 = fp8_blocks.to_e4m3 = to_e4m2


def read_losses(name: str, options: dict) -> list[float]:
    path = Path(options["dir"]) / name / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["loss_main"] for line in path.read_text().splitlines()]


def compare(losses: dict[str, list[float]], options: dict) -> dict:
    """Means over the last steps and gaps to bf16 in percent, of the runs that reached the last step."""
    steps, last = int(options["steps"]), int(options["last"])
    means = {name: sum(run[steps - last : steps]) / last for name, run in losses.items() if len(run) >= steps}
    gaps = {name: 100 * abs(mean - means["bf16"]) / means["bf16"] for name, mean in means.items() if "bf16" in means}
    passed = {name: gaps[name] > limit if word == "above" else gaps[name] <= limit
              for name, (word, limit) in LIMITS.items() if name in gaps}
    return {
        "steps": steps, "last": last, "mean_loss": means, "gap_percent": gaps, "passed": passed,
        "done": {name: len(run) for name, run in losses.items()},
    }


def table(losses: dict, summary: dict, options: dict) -> str:
    lines = [
        f"`python tools/fp8_parity.py threads={options['threads']}`: model {options['model']}, {options['batch']} x "
        f"{options['sequence']} tokens a step, {summary['steps']} steps, learning rate {options['learning_rate']} at its "
        f"peak; loss_main over the last {summary['last']}",
        "", "| run | steps done | mean loss | gap to bf16 | must be |", "|---|---|---|---|---|",
    ]
    for name, run in losses.items():
        mean, gap = summary["mean_loss"].get(name), summary["gap_percent"].get(name)
        must = f"{LIMITS[name][0]} {LIMITS[name][1]} %" if name in LIMITS else ""
        lines.append(
            f"| {name} | {len(run)} | {'' if mean is None else f'{mean:.5f}'} "
            f"| {'' if gap is None or name == 'bf16' else f'{gap:.3f} %'} | {must} |"
        )
    return "\n".join(lines)


def curve(losses: dict[str, list[float]]) -> str:
    """An SVG: each run's loss, and below it its gap to bf16, both as means over WINDOW steps."""
    smooth = {name: means(run) for name, run in losses.items()}
    gaps = {
        name: [100 * (loss / other - 1) for loss, other in zip(line, smooth["bf16"])]
        for name, line in smooth.items() if "bf16" in smooth and name != "bf16"
    }
    steps = max([len(run) for run in losses.values()] or [1])
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="600" font-family="sans-serif" '
             f'font-size="12"><rect width="{WIDTH}" height="600" fill="white"/>']
    parts += panel(smooth, f"loss_main, mean of {WINDOW} steps", steps, 30, 320)
    parts += panel(gaps, "gap to bf16, %", steps, 370, 560)
    for row, name in enumerate(smooth):
        parts.append(f'<text x="{WIDTH - 120}" y="{46 + 16 * row}" fill="{COLOURS[name]}">{name}</text>')
    return "\n".join([*parts, f'<text x="{WIDTH / 2}" y="594" text-anchor="middle">step</text></svg>'])


def means(run: list[float]) -> list[float]:
    """Of WINDOW steps each; a rest counts as one more."""
    parts = [run[first : first + WINDOW] for first in range(0, len(run), WINDOW)]
    return [sum(part) / len(part) for part in parts]


def panel(lines: dict[str, list[float]], title: str, steps: int, top: int, bottom: int) -> list[str]:
    """Lines of means between two heights of the picture."""
    left, right = 50, WIDTH - 20
    values = [value for line in lines.values() for value in line] or [0.0]
    low, high = min(values), max(values)

    def x(step: float) -> float:
        return left + (right - left) * step / steps

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / ((high - low) or 1.0)

    parts = [f'<text x="{left}" y="{top - 10}">{title}</text>']
    for part in range(5):
        value, step = low + (high - low) * part / 4, steps * part / 4
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 16}" text-anchor="middle">{step:.0f}</text>')
    for name, line in lines.items():
        points = " ".join(f"{x(min(WINDOW * (i + 0.5), steps)):.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.4"/>')
    return parts


if __name__ == "__main__":
    main()
