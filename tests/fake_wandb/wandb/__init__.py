"""Stands in for wandb in tests: found before it where PYTHONPATH names the folder above.

Writes every call into the file FAKE_WANDB_CALLS, one JSON list a line. FAKE_WANDB="hang init" makes that call never
return, "raise init" makes it fail; "online" in place of "init" fails only the start with that mode, and "chatter" prints.
"""

import json
import os
import time

BEHAVIOUR = os.environ.get("FAKE_WANDB", "").split()


def called(name, /, **arguments):
    with open(os.environ["FAKE_WANDB_CALLS"], "a") as file:
        file.write(json.dumps([name, arguments]) + "\n")
    if name in BEHAVIOUR:
        if "hang" in BEHAVIOUR:
            while True:
                time.sleep(3600)
        raise RuntimeError(f"{name}\nfails")


class Settings:
    def __init__(self, **settings):
        self.settings = settings


class Histogram:
    def __init__(self, np_histogram):
        self.counts, self.edges = np_histogram


class Run:
    url = "https://wandb.example/me/project/runs/1"

    def __init__(self, folder):
        self.dir = os.path.join(folder, "wandb", "run-1", "files")

    def define_metric(self, name, **options):
        called("define_metric", name=name, **options)

    def log(self, row):
        if "chatter" in BEHAVIOUR:
            print("noise on standard output", flush=True)
        called("log", row={
            key: {"counts": item.counts, "edges": item.edges} if isinstance(item, Histogram) else item
            for key, item in row.items()
        })

    def finish(self, exit_code):
        called("finish", exit_code=exit_code)


def init(**arguments):
    called(arguments["mode"])
    called("init", **arguments | {"settings": arguments["settings"].settings})
    return Run(arguments["dir"])


def teardown(exit_code):
    called("teardown", exit_code=exit_code)
