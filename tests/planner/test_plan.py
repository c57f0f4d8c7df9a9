"""`dstrain plan`: the table, the text drawing and the picture show the schedule that the lists hold."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from dstrain.cli import main
from dstrain.config.compose import compose
from dstrain.parallel.schedules.build import NAMES, build_schedule
from dstrain.parallel.schedules.simulate import simulate
from dstrain.planner.draw import COLOURS, IDLE, LEFT, draw_svg, draw_text

EIGHT = ["parallel.pp=8", "schedule=dualpipe", "batch.micro_batches=20"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_text_of_a_small_schedule_by_hand():
    """1F1B on 2 ranks: a bubble of (R-1)(F+B) = 3 slots a rank."""
    drawn = draw_text(build_schedule("1f1b", 2, 3), 100).split("\n\n")[0]
    assert drawn == "\n".join([
        "time    0              5              10",
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .",
    ])


def test_text_shows_split_backwards_weight_gradients_and_pairs():
    """DualPipe on 2 ranks has no bubble: (R/2 - 1)(…) = 0."""
    drawn = draw_text(build_schedule("dualpipe", 2, 4), 100)
    assert "rank 0  F0 F2 F1 B2--- F3&B0--- B3--- b1 W1" in drawn
    assert "rank 1  F2 F0 F3 B0--- F1&B2--- B1--- b3 W3" in drawn


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_text_fits_the_terminal_and_what_does_not_is_said(columns):
    schedule = build_schedule("dualpipe", 4, 100)
    *panels, _ = draw_text(schedule, columns).split("\n\n")
    note = panels.pop() if panels[-1].startswith("…") else None
    assert all(len(line) <= columns for panel in panels for line in panel.split("\n"))
    slots = round(simulate(schedule).makespan)
    shown = min(slots, 6 * ((columns - len("rank 0  ")) // 4))  # numbers of two digits: 4 characters a slot
    assert (note is None) == (shown == slots)
    if note:
        assert f"times {shown} to {slots} are cut" in note
    whole = draw_text(schedule, 10**6).split("\n\n")[0].split("\n")
    for rank in range(4):  # the panels side by side are the one wide drawing
        row = "".join(panel.split("\n")[1 + rank][8:].ljust((columns - 8) // 4 * 4) for panel in panels)
        assert row.rstrip() == whole[1 + rank][8 : 8 + 4 * shown].rstrip()


@pytest.mark.parametrize("name", NAMES)
def test_picture_holds_every_action_where_the_simulation_puts_it(name):
    schedule = build_schedule(name, 4, 9 if name != "dualpipe" else 10)
    line = simulate(schedule)
    root = ElementTree.fromstring(draw_svg(schedule))
    unit = 8 + 7 * len(str(schedule.micro_batches - 1))
    groups = root.findall(f"{SVG}g")
    expected = []
    for rank, actions in enumerate(schedule.actions):
        for action, start, end in zip(actions, line.start[rank], line.end[rank], strict=True):
            expected.append((rank, action, start, end))
    assert len(groups) == len(expected)
    tops: dict[float, int] = {}
    for group, (rank, action, start, end) in zip(groups, expected, strict=True):
        boxes, numbers = group.findall(f"{SVG}rect"), [text.text for text in group.findall(f"{SVG}text")]
        works = [work for work in (action.forward, action.backward) if work is not None]
        assert numbers == [str(work.micro_batch) for work in works] and len(boxes) == len(works)
        assert group.find(f"{SVG}title").text == f"{action}, {start:g} to {end:g}"
        kinds = {"F": "F", "FB": "FB", "W": "W", "B": "b" if action.split else "B"}[action.kind]
        for box, work, kind in zip(boxes, works, kinds, strict=True):
            assert float(box.get("x")) == LEFT + unit * start and float(box.get("width")) == unit * (end - start)
            assert box.get("fill") == COLOURS[kind][work.stage >= schedule.ranks // (2 if name == "dualpipe" else 1)]
        assert sum(float(box.get("height")) for box in boxes) == 30
        tops.setdefault(float(boxes[0].get("y")), rank)
        assert tops[float(boxes[0].get("y"))] == rank
    assert sorted(tops) == list(tops) and len(tops) == 4  # a row each, rank 0 on top
    idle = [box for box in root.findall(f"{SVG}rect") if box.get("fill") == IDLE and box.get("width") != "18.0"]
    assert [float(box.get("width")) for box in idle] == [unit * line.makespan] * 4  # it shows where nothing lies on it
    width = float(root.get("width"))
    assert all(float(box.get("x")) + float(box.get("width")) <= width for box in root.iter(f"{SVG}rect")
               if box.get("width") != "100%")


def test_legend_names_what_occurs_and_the_axis_counts_time():
    pictures = {name: ElementTree.fromstring(draw_svg(build_schedule(name, 2, 4))) for name in NAMES}
    texts = {name: {text.text for text in picture.findall(f"{SVG}text")} for name, picture in pictures.items()}
    assert {"forward", "backward", "idle"} <= texts["1f1b"] and "weight gradients" not in texts["1f1b"]
    assert {"backward, weight gradients kept", "weight gradients"} <= texts["zb1p"] and "backward" not in texts["zb1p"]
    assert {"overlapped pair", "backward", "darker: the second of a rank's two stages"} <= texts["dualpipe"]
    assert {"0", "5", "10", "time, in forwards of one stage; the number is the micro-batch"} <= texts["1f1b"]


def test_command_of_the_readme(capsys, tmp_path):
    """8 ranks, 20 micro-batches: idle (8/2 - 1)(3 + 2 - 3) = 6 beside 20 · (1 + 2) of work, 9 = PP + 1 activations."""
    assert main(["plan", "schedule=dualpipe", "parallel.pp=8", "batch.micro_batches=20", "show=true"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("dualpipe, 8 ranks, 20 micro-batches: idle 6 of 66 (9.1%)\n")
    assert "(pp/2 - 1)(F&B + B - 3W) = 6" in out and "\nrank 7  F10 F11 F12" in out
    # REFERENCE §4 for h = 0: F 7 + 1 + 3; B 3 (split) + 3 + 1 + 1 (split) + 3 (split); W 3 + 3 + 1; pairs 2·3 + 3
    assert re.search(r"^ +0 +0 7 +11 +4 +7 +7 +9 +6 +9 +1$", out, re.MULTILINE)
    assert re.search(r"^ +3 +3 4 +9 +5 +4 +4 +11 +6 +9 +4$", out, re.MULTILINE)
    assert out.endswith("picture: dualpipe-8x20.svg\n")
    assert (tmp_path / "dualpipe-8x20.svg").read_text() == draw_svg(build_schedule("dualpipe", 8, 20))


def test_without_show_only_the_figures_and_a_picture_where_asked(capsys, tmp_path):
    assert main(["plan", "schedule=1f1b", "parallel.pp=2", "batch.micro_batches=3"]) == 0
    out = capsys.readouterr().out
    assert "F0" not in out and "picture" not in out and list(tmp_path.iterdir()) == []
    assert "idle 3 of 12 (25.0%)" in out and "(pp - 1)(F + B) = 3" in out
    assert main(["plan", "schedule=zb1p", "parallel.pp=2", "batch.micro_batches=3", "out=z.svg"]) == 0
    out = capsys.readouterr().out
    assert "idle by formula, from 2 micro-batches on: (pp - 1)(F + B - 2W) = 1" in out
    assert out.endswith("picture: z.svg\n") and (tmp_path / "z.svg").is_file()


def test_schedule_is_short_for_parallel_schedule():
    for given in (["schedule=zb1p"], ["parallel.schedule=zb1p"], ["schedule=1f1b", "parallel.schedule=zb1p"]):
        assert compose("plan", given)[0].parallel.schedule == "zb1p"
    config = compose("plan", ["schedule=deepseek_v3", "schedule=dualpipe"])[0]  # the group keeps its own files
    assert config.schedule.tokens == 14.8e12 and config.parallel.schedule == "dualpipe"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["parallel.pp=5", *EIGHT[1:]],
         "parallel.pp=5: schedule dualpipe needs an even number of ranks; nearest valid: 4 or 6"),
        ([*EIGHT, "batch.micro_batches=15"], "nearest valid: 16"),
        ([*EIGHT, "batch.micro_batches=17"], "nearest valid: 16 or 18"),
        (["schedule=dualpip"], "parallel.schedule=dualpip: must be one of 1f1b, zb1p, dualpipe, dualpipev"),
        (["parallel.pp=0"], "parallel.pp=0: must be at least 1 and at most 65536"),
        (["parallel.pp=64", "batch.micro_batches=5000"], "micro_batches=5000: must be at least 1 and at most 1024"),
        (["out=picture.png"], "out=picture.png: must be null or the path of an .svg file"),
        ([*EIGHT, "out=nowhere/a.svg"], "out=nowhere/a.svg: cannot write the picture: No such file or directory"),
        (["show=maybe"], "show: true or false expected"),
        (["model=tiny"], "cluster has no value: give cluster=…"),
        (["cluster=h900"], "unknown choice cluster=h900 (valid: b200, cpu_2cores, h100, h200, h800_2048)"),
        (["search=true"], "search=true needs a cluster"),
        ([*EIGHT, "output=json"], "output=json needs a cluster"),
        (["cluster=h100", "cluster.bf16_achieved=1.5"], "cluster.bf16_achieved=1.5: must be above 0 and at most 1"),
        (["cluster=cpu_2cores", "precision=fp8"], "precision=fp8: cluster cpu_2cores has no FP8"),
        (["cluster=cpu_2cores", "phases=h801"], "phases=h801: cannot read h801.yaml (FileNotFoundError); valid: h800_v3"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert line in err and err.startswith("dstrain: ") and err.count("\n") == 1
    assert out == "" or "out=nowhere/a.svg" in arguments
