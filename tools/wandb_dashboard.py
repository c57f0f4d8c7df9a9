"""The dashboard of runs in W&B: a saved view of a project, a section a group of `dstrain/telemetry/wandb_names.py`.

    python tools/wandb_dashboard.py entity=TEAM project=dstrain   # needs a key, and pip install "wandb[workspaces]"
    python tools/wandb_dashboard.py out=dashboard.json            # the same as JSON, without W&B

`name=` is the view's name. Every panel has the optimizer step on its x axis, so that a continued run is one curve. A
panel of one series a source, MTP depth or layer finds them by a regular expression. Histograms of expert load
(`moe/load`) are drawn by a project's automatic workspace, which this view leaves alone.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dstrain.telemetry.wandb_names import MIN_LOAD, NAMES, OF_LAYER, STARVING, STEP

DEFAULTS = {"entity": "", "project": "dstrain", "name": "dstrain", "out": ""}
LOG = ("loss/balance", "optim/grad_norm")  # drawn on a logarithmic axis
SERIES = ("loss_mtp", "data_shares", "data_task_shares", "data_epochs")  # keys that are several series each
EVAL = ("loss", "bits_per_byte", "accuracy")


def main() -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    wrong = [text for text in sys.argv[1:] if text.split("=", 1)[0] not in DEFAULTS or "=" not in text]
    if wrong:
        sys.exit(f"unknown option {wrong[0]!r}; valid: {', '.join(f'{key}=' for key in DEFAULTS)}")
    plan = dashboard()
    if options["out"]:
        text = json.dumps({"name": options["name"], "x": STEP, "sections": plan}, indent=1)
        Path(options["out"]).write_text(f"{text}\n")
        print(f"{sum(len(section['panels']) for section in plan)} panels, written to {options['out']}")
        return
    if not options["entity"]:
        sys.exit("entity= is missing: the user or team that the project belongs to; valid too: out=FILE, without W&B")
    print(workspace(plan, options).save().url)


def dashboard() -> list[dict]:
    """Sections {name, panels}; a panel {title, y: names of series, or regex: of series; log_y}."""
    groups = ("loss", "eval", "moe", "optim", "schedule", "speed", "data")
    sections: dict[str, list[dict]] = {group: [] for group in groups}
    for key, name in NAMES.items():
        several = {"y": [], "regex": f"^{name}[/_].*"} if key in SERIES else {"y": [name], "regex": None}
        sections[name.split("/")[0]].append({"title": name, **several, "log_y": name in LOG})
    for name in (MIN_LOAD, STARVING):
        sections["moe"].append({"title": name, "y": [name], "regex": None, "log_y": False})
    sections["moe"].append({"title": OF_LAYER, "y": [], "regex": f"^{OF_LAYER}/.*", "log_y": False})
    for name in EVAL:
        both = [f"eval/{name}", f"eval/whole/{name}"]
        sections["eval"].append({"title": f"eval/{name}", "y": both, "regex": None, "log_y": False})
    for name in ("loss_mtp", "accuracy_mtp"):
        sections["eval"].append(
            {"title": f"eval/{name}", "y": [], "regex": f"^eval/(whole/)?{name}_.*", "log_y": False}
        )
    return [{"name": name, "panels": panels} for name, panels in sections.items()]


def workspace(plan: list[dict], options: dict):
    """The view as wandb-workspaces has it, not saved yet."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        sys.exit('wandb-workspaces is not installed: pip install "wandb[workspaces]"; valid too: out=FILE, without it')
    return workspaces.Workspace(
        entity=options["entity"], project=options["project"], name=options["name"],
        sections=[
            workspaces.Section(
                name=section["name"], is_open=True,
                panels=[
                    reports.LinePlot(
                        title=panel["title"], x=STEP, y=panel["y"], metric_regex=panel["regex"], log_y=panel["log_y"]
                    )
                    for panel in section["panels"]
                ],
            )
            for section in plan
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP),
    )


if __name__ == "__main__":
    main()
