"""wandb in a process of its own, beside the first rank: `python -m dstrain.telemetry.wandb_process`.

Whatever wandb does, prints or waits for happens here. Standard input brings one JSON object a line:

    {mode, dir, id, project, entity, group, name, config, stats_pid}     the first
    {"values": {name: number, …}}                                        one row, with "step" in it
    {"histogram": name, "counts": […], "edges": […], "step": n}          a row with a histogram
    {"finish": exit code}                                                the last; an end without it is a failed run

Standard output takes one JSON object a line: {"up": directory, "url": address or null}, {"warning": text}. What wandb
prints goes to standard error, which is `logs/wandb.log` of the run folder. {"lost": text} is the last before the end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dstrain
from dstrain.telemetry.wandb_names import STEP

ALONE = 60.0  # seconds to send the rest where the run is gone and nobody waits or kills


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the run; this process ends when its input does
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()

    def answer(**what: object) -> None:
        with suppress(OSError):  # the run is gone; its records are sent all the same
            answers.write(json.dumps(what) + "\n")

    start = json.loads(sys.stdin.buffer.readline())
    start["config"]["code"] |= code_version()
    try:
        run = begin(start, answer)
    except Exception as error:
        answer(lost=one_line(error))
        raise
    run.finish(exit_code=follow(run, answer))


def leave_with(parent: int) -> None:
    """End this process ALONE seconds after the run's, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(2)
    time.sleep(ALONE)
    os._exit(1)


def begin(start: dict, answer):
    """The wandb run that `start` describes, offline where online fails."""
    try:
        run = open_run(start)
    except Exception as error:
        if start["mode"] != "online":
            raise
        leave_service()
        start["mode"] = "offline"
        run = open_run(start)
        answer(warning=f"{one_line(error)}; recording offline")
    # wandb's own step only grows, and drops what a run logs again behind a resume from an older checkpoint
    run.define_metric(STEP, hidden=True)
    run.define_metric("*", step_metric=STEP)
    answer(up=str(Path(run.dir).parent), url=run.url if start["mode"] == "online" else None)
    return run


def open_run(start: dict):
    import wandb

    return wandb.init(
        mode=start["mode"], dir=start["dir"], id=start["id"], resume="allow", project=start["project"],
        entity=start["entity"], group=start["group"], name=start["name"], config=start["config"], allow_val_change=True,
        settings=wandb.Settings(
            console="off", disable_code=True, disable_git=True, x_stats_pid=start["stats_pid"],
        ),
    )


def leave_service() -> None:
    """wandb's service keeps the id of a run that did not start; the next `init` begins another service."""
    import wandb

    wandb.teardown(exit_code=1)


def follow(run, answer) -> int:
    """Log what comes in until the end. -> the run's exit code."""
    import wandb

    warned = False
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
            if "finish" in message:
                return message["finish"]
            if "values" in message:
                run.log(message["values"])
            else:
                histogram = wandb.Histogram(np_histogram=(message["counts"], message["edges"]))
                run.log({STEP: message[STEP], message["histogram"]: histogram})
        except Exception as error:
            if not warned:
                answer(warning=f"{one_line(error)}; some records are missing there")
            warned = True
            print(f"dstrain: {line[:200]!r} was not logged: {one_line(error)}", file=sys.stderr)
    return 1


def code_version() -> dict:
    """Of dstrain: its version, and the commit of its sources, with -dirty behind it where they differ from that."""
    root, found = Path(dstrain.__file__).resolve().parents[1], {"dstrain": None, "git": None}
    with suppress(PackageNotFoundError):
        found["dstrain"] = version("dstrain")
    if (root / ".git").exists():  # else git would look for a repository further up
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            found["git"] = done.stdout.strip()
    return found


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    main()
