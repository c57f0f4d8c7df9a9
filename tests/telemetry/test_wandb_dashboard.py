"""The dashboard shows what a run records: its series are those of `wandb_names` for a record with every key."""

import json
import re
import subprocess
import sys

import pytest
from test_wandb_names import LAYERS, RECORD
from test_wandb_run import ROOT

from dstrain.telemetry.wandb_names import STEP, eval_values, step_values

TOOL = ROOT / "tools/wandb_dashboard.py"


def call(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=120)


def test_every_series_of_a_run_is_in_a_panel_and_every_panel_has_a_series(tmp_path):
    done = call(f"out={tmp_path / 'dashboard.json'}", "name=mine")
    assert done.returncode == 0, done.stderr
    dashboard = json.loads((tmp_path / "dashboard.json").read_text())
    assert (dashboard["name"], dashboard["x"]) == ("mine", STEP)
    evaluation = {"step": 1, "tokens": 1, "loss": 1.0, "loss_mtp": [1.0, 2.0], "bits_per_byte": 1.0, "accuracy": 0.5,
                  "accuracy_mtp": [0.25, 0.125]}
    evaluations = eval_values(evaluation | {"whole": False}) | eval_values(evaluation | {"whole": True})
    recorded = set(step_values(RECORD, LAYERS) | evaluations) - {STEP, "other/unheard"}
    shown = set()
    for section in dashboard["sections"]:
        for panel in section["panels"]:
            found = set(panel["y"]) | {name for name in recorded if panel["regex"] and re.search(panel["regex"], name)}
            assert found and found <= recorded, panel
            shown |= found
    assert shown == recorded
    assert [section["name"] for section in dashboard["sections"]] == [
        "loss", "eval", "moe", "optim", "schedule", "speed", "data"
    ]


@pytest.mark.parametrize("arguments, line", [
    ([], "entity= is missing"),
    (["out"], "unknown option 'out'"),
    (["team=x"], "unknown option 'team=x'; valid: entity="),
])
def test_bad_options_are_one_line(arguments, line):
    done = call(*arguments)
    assert done.returncode == 1 and done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_the_package_for_the_view_is_named_where_it_is_missing_and_makes_every_panel_where_it_is_there():
    done = subprocess.run(
        [sys.executable, "-c", f"""
import json, sys
sys.path.insert(0, {str(TOOL.parent)!r})
import wandb_dashboard as tool
plan = tool.dashboard()
view = tool.workspace(plan, tool.DEFAULTS | {{"entity": "us"}})._to_model().model_dump(mode="json", by_alias=True)
print(json.dumps(view).count('"Run History Line Plot"'), sum(len(section["panels"]) for section in plan))
"""], capture_output=True, text=True, timeout=120)
    if done.returncode:
        assert done.stderr.startswith('wandb-workspaces is not installed: pip install "wandb[workspaces]"')
        assert done.stderr.count("\n") == 1
        return
    made, planned = done.stdout.split()
    assert made == planned
