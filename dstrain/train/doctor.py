"""`dstrain doctor`: every check that `dstrain train` makes before its first step, with what was measured."""

from pathlib import Path

from dstrain.config.schema import TrainConfig
from dstrain.data.corpus import build_corpus, open_corpus
from dstrain.model.count import count_parameters
from dstrain.parallel.world import World
from dstrain.telemetry.console import RunConsole
from dstrain.train.main import place
from dstrain.train.needs import checkpoint_bytes
from dstrain.train.preflight import FACTORS, GIB, about, agree, disk_lines, measure, memory_warnings, slow, speed_lines


def doctor(config: TrainConfig, plain: dict, overrides: list[str], world: World | None = None) -> int:
    """Check the run that `config` describes, as one rank of `world`. -> 0, warnings or not.

    Raises InputError where training would.
    """
    world = world or World.start()
    console = RunConsole(config.telemetry.log_every, quiet=not world.is_first)
    device, precision, layout, (need, have) = world.all(lambda: place(config, world))
    for line in [*about(world, device), *layout.lines()]:
        console.say(line)
    console.say(f"memory: {need / GIB:,.2f} GiB for weights, gradients and optimizer, {have / GIB:,.2f} GiB there")
    world.first(lambda: build_corpus(config.data))
    corpus = world.all(lambda: open_corpus(config.data))
    agree(world, {"the data": (corpus.fingerprint,)})
    console.say(f"data {corpus.name}: {corpus.train_tokens:,} training tokens, the same on all ranks")
    root = Path(config.run.dir) / config.run.name / "checkpoints"
    each = checkpoint_bytes(config, count_parameters(config.model), precision)
    line, warnings = disk_lines(root, each, config.checkpoint.keep)
    console.say(line)
    layout.connect(device)
    everyone = layout.mesh.host_group.gather_objects(measure(layout, device), "measurements")
    warnings += slow(everyone, FACTORS[device.type]) + memory_warnings(everyone, need)
    for line in [*speed_lines(everyone), *(f"WARNING: {warning}" for warning in warnings)]:
        console.say(line)
    console.say("no warnings" if not warnings else f"warnings: {len(warnings)}")
    world.end()
    return 0
