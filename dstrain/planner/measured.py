"""Measured phase times: a YAML file with the medians, and the run that they were measured in.

    about: where the numbers come from
    run: [model=v3_671b, …]        overrides of `dstrain plan`: the measured layout
    milliseconds: {attention F: 4.36, …}

Names: attention, experts F B W; dispatch, combine F B; embed, head, merge F B W; transfer; reduce, gather, optimizer
(of a whole step). Of a name that is not there the analytic time counts.
"""

from pathlib import Path

import yaml

from dstrain.config.compose import compose
from dstrain.config.errors import InputError, nearest
from dstrain.config.overrides import config_folder
from dstrain.parallel.schedules.pair import ORDER
from dstrain.planner.job import Job
from dstrain.planner.step import tail_seconds
from dstrain.planner.times import Factors, Times
from dstrain.planner.work import embed_work, head_work, merge_work

UNITS = {"embed": embed_work, "head": head_work, "merge": merge_work}
NAMES = [f"{phase.name} {phase.part}" for phase in ORDER] + [f"{unit} {part}" for unit in UNITS for part in "FBW"]
NAMES += ["transfer", "reduce", "gather", "optimizer"]


def load_factors(phases: str) -> Factors:
    """`phases`: a file of configs/phases by its name, or a path. -> measured over analytic, by name."""
    path = Path(phases) if phases.endswith((".yaml", ".yml")) else config_folder() / "phases" / f"{phases}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        known = ", ".join(sorted(p.stem for p in (config_folder() / "phases").glob("*.yaml")))
        raise InputError(f"phases={phases}: cannot read {path.name} ({type(error).__name__}); valid: {known}, or the "
                         "path of a .yaml file") from None
    if not isinstance(content, dict) or not {"run", "milliseconds"} <= content.keys():
        raise InputError(f"phases={phases}: {path.name} must have the keys run and milliseconds")
    measured = content["milliseconds"]
    for name, value in measured.items():
        if name not in NAMES:
            raise InputError(f"phases={phases}: unknown phase {name!r}{nearest(name, NAMES)}")
        if not isinstance(value, int | float) or value < 0:
            raise InputError(f"phases={phases}: {name}: {value!r} must be milliseconds, at least 0")
    job = Job.of(compose("plan", list(content["run"]))[0])
    analytic = analytic_milliseconds(job)
    return {name: value / analytic[name] for name, value in measured.items() if analytic.get(name)}


def analytic_milliseconds(job: Job) -> dict[str, float]:
    """What the formulas give for every name in the job's own run: of a MoE layer, of the whole step."""
    times = Times(job)
    found = {f"{phase.name} {phase.part}": seconds for phase, seconds in times.blocks[True].phases.items()}
    found |= {f"{unit} {part}": times.compute(f"{unit} {part}", work)
              for unit, of in UNITS.items() for part, work in of(job).items()}
    found |= tail_seconds(job, times) | {"transfer": times.transfer()}
    return {name: seconds * 1e3 for name, seconds in found.items()}
