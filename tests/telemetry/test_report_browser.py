"""The report in a real browser: every panel drawn, at a desk's and a phone's width, and no error in the console.

A script that the test appends to the page looks at what is there, points, drags and slides, and writes down what it
finds as JSON, which the browser prints with the page (--dump-dom). Left out where there is no Chromium.
"""

import html
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from report_runs import config, evaluation, row, write_run

from dstrain.cli import main

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1 "
    "--enable-logging=stderr --v=0"
).split()

WATCH = """<script>
window.problems = [];
addEventListener("error", event => problems.push(event.message), true);
addEventListener("securitypolicyviolation", event => problems.push(`${event.violatedDirective} ${event.blockedURI}`));
Element.prototype.setPointerCapture = () => {};  // which refuses pointers that a script has made up
</script>"""
PROBE = """<script>
const found = {};
function colours(canvas) {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), seen = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3]) seen.add(`${data.slice(i, i + 3)}`);
  return seen.size;
}
function panelsNow() {
  return [...document.querySelectorAll("figure[data-panel]")].map((figure, i) => {
    const drawing = figure.querySelector("svg[role=img]"), box = drawing.getBoundingClientRect(), chart = charts[i];
    const inside = x => x >= LEFT - 1 && x <= chart.width - RIGHT + 1;
    const ends = [...drawing.querySelectorAll(".line")].map(path => path.getBBox());
    return {
      title: figure.querySelector("h3").textContent, lines: ends.length, dots: drawing.querySelectorAll(".dot").length,
      evaluations: drawing.querySelectorAll(".evaluation").length, flags: drawing.querySelectorAll(".flag").length,
      bands: drawing.querySelectorAll(".band").length, faint: drawing.querySelectorAll(".faint").length,
      broken: /NaN|Infinity|undefined|null/.test(drawing.outerHTML), width: box.width, height: box.height,
      inside: ends.every(({x, width}) => inside(x) && inside(x + width)), long: ends.some(({width}) => width > 100),
      labels: [...drawing.querySelectorAll("text")].map(text => text.textContent),
    };
  });
}
function pointAt(chart, x, kind = "pointermove") {
  const box = chart.place.getBoundingClientRect();
  const made = {clientX: box.left + x, clientY: box.top + 60, bubbles: true, pointerType: "mouse", button: 0};
  chart.place.dispatchEvent(new PointerEvent(kind, made));
  return tip.hidden ? null : tip.innerText.replace(/\\s+/g, " ").trim();
}
function pixel(canvas, x, y) {
  const ratio = devicePixelRatio;
  return [...canvas.getContext("2d").getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data].slice(0, 3);
}
found.panels = panelsNow();
found.page = [innerWidth, document.documentElement.scrollWidth];
found.canvases = {};
for (const canvas of document.querySelectorAll("canvas")) found.canvases[canvas.id] = colours(canvas);
found.tips = charts.map(chart => chart.lines.length && pointAt(chart, chart.x(chart.lines[0].x.at(-1))));
STEPS
found.problems = problems;
const report = document.createElement("pre");
report.id = "probe";
report.textContent = JSON.stringify(found);
document.body.append(report);
</script>"""

FRAME = """<!DOCTYPE html><meta charset=utf-8>
<iframe style="width:{width}px;height:1200px;border:0" srcdoc="{source}"></iframe>
<script>const frame = document.querySelector("iframe");
frame.addEventListener("load", () => document.body.append(frame.contentDocument.getElementById("probe")));</script>"""


def look(path: Path, width: int, steps: str, folder: Path) -> dict:
    """What the probe finds in the page. steps: more of its JavaScript."""
    source = path.read_text().replace("<title>", f"{WATCH}<title>", 1)
    source = source.replace("</body></html>", PROBE.replace("STEPS", steps) + "</body></html>")
    if width < 500:  # the narrowest window that Chromium opens
        source = FRAME.format(width=width, source=html.escape(source))
    probed = folder / "probed.html"
    probed.write_text(source)
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1200", "--dump-dom",
               probed.as_uri()]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=400)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its helpers too
        except ProcessLookupError:
            pass
    probe = re.search(r'<pre id="probe">(.*?)</pre>', out, re.DOTALL)
    ours = "Multiple readback operations"  # a hint about the probe's own way to see colours
    console = [line for line in err.splitlines() if "CONSOLE" in line and ours not in line]
    assert probe, f"the page's script has not come to its end: {console or err[-2000:]}"
    found = json.loads(html.unescape(probe[1])) | {"console": console}
    return found


def check(found: dict, width: int) -> None:
    assert found["problems"] == [] and found["console"] == []
    assert found["page"][0] == width and found["page"][1] <= width  # nothing sticks out to the right
    for panel in found["panels"]:
        assert panel["lines"] + panel["dots"] + panel["evaluations"] > 0, panel["title"]
        assert not panel["broken"] and panel["inside"], panel["title"]
        assert panel["width"] > min(300, width - 60) - 1 and panel["height"] > 150, panel["title"]
        assert len(panel["labels"]) >= 4, panel["title"]


def whole_run(folder: Path, steps: int = 700) -> Path:
    """A run with everything that has a panel; expert 5 of the first of 4 MoE layers starves in the second half."""
    rows, traffic = [], {"dispatch_slow_bytes": 1e9, "dispatch_fast_bytes": 2e9}
    for step in range(1, steps + 1):
        load = np.full((4, 16), 100)
        load[0, 5] = 2 if step > steps / 2 else 100
        load[3] = np.arange(16) * 10 + 10
        skipped = step in (200, 300)
        gone = {"loss_main": None, "grad_norm": None} if skipped else {}
        rows.append(row(step, moe_load=load.tolist(), step_time_spread=0.1, slowest_rank=step % 7, skipped=skipped,
                        data_shares={"web": 0.7, "code": 0.3}, data_task_shares={"fact": 0.7}, **traffic, **gone))
    evaluations = [evaluation(step) for step in range(100, steps, 100)] + [evaluation(steps, whole=True)]
    return write_run(folder, rows, evaluations, config(dense=1, layers=3, depth=2), {"status": "finished"})


def test_every_panel_is_drawn_and_answers_to_the_mouse(tmp_path):
    folder = whole_run(tmp_path / "<b>run</b>")
    assert main(["report", f"run={folder}"]) == 0
    found = look(folder / "report.html", 1440, """
    const slider = document.getElementById("load-time"), map = document.getElementById("load-map");
    found.when = document.getElementById("load-when").textContent;
    found.layer = document.getElementById("load-layer").selectedOptions[0].text;
    const cell = (map.clientWidth - 54) / 16, high = (map.clientHeight - 25) / 4;
    const at = (row, column) => [54 + (column + .4) * cell, 5 + (row + .4) * high];
    found.pixels = [[0, 5], [1, 5], [3, 15], [3, 1]].map(([row, column]) => pixel(map, ...at(row, column)));
    const box = map.getBoundingClientRect(), [x, y] = at(0, 5);
    map.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x, clientY: box.top + y}));
    found.cell = tip.innerText.replace(/\\s+/g, " ").trim();
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
    found.first = [document.getElementById("load-when").textContent, pixel(map, ...at(0, 5))];
    found.at = [99, 199, 149].map(i => pointAt(charts[0], charts[0].x((2 * i + 2) * 1000)));
    const smooth = document.getElementById("smooth");
    smooth.value = 15;
    smooth.dispatchEvent(new Event("change"));
    found.smoothed = panelsNow();
    pointAt(charts[0], charts[0].x(400000), "pointerdown");
    pointAt(charts[0], charts[0].x(600000), "pointermove");
    pointAt(charts[0], charts[0].x(600000), "pointerup");
    found.zoomed = [charts[3].from, charts[5].to, document.getElementById("whole").hidden, panelsNow()];
    document.getElementById("whole").click();
    found.back = [charts[3].from, charts[3].to];
    """, tmp_path)
    check(found, 1440)
    assert [panel["title"] for panel in found["panels"]] == [
        "Main loss", "MTP losses", "Balance loss", "Held-out accuracy", "Bits per byte", "Gradient norm", "Learning rate",
        "Bias speed", "MTP weight", "Batch", "Tokens per second", "Model FLOPs utilization", "Spread of step times", "Slowest rank",
        "Token dispatch", "Maximal violation", "Shares of the sources", "Shares of the tasks", "Epochs"]
    panels = {panel["title"]: panel for panel in found["panels"]}
    assert panels["Held-out accuracy"]["evaluations"] == 21 and "40%" in panels["Held-out accuracy"]["labels"]
    assert panels["Main loss"]["evaluations"] == 7 and panels["MTP losses"]["evaluations"] == 14
    assert panels["Main loss"]["flags"] == panels["Gradient norm"]["flags"] == 2
    assert panels["MTP losses"]["lines"] == panels["MTP losses"]["bands"] == 2 and panels["Slowest rank"]["dots"] == 350
    assert all(panel["long"] for title, panel in panels.items() if title not in ("Bits per byte", "Held-out accuracy", "Slowest rank"))
    assert panels["Model FLOPs utilization"]["labels"][0] == "0%" and "600K" in panels["Main loss"]["labels"]
    # colours: violet for the starving one, the ground's for an even one, red and blue for 1.9 and 0.24 of the mean
    violet, even, red, blue = found["pixels"]
    assert violet == [142, 36, 170] and even == [241, 241, 238]
    assert red[0] > red[2] + 20 and blue[2] > blue[0] + 60
    assert found["layer"] == "1" and found["when"].endswith(" to 700, up to 700K tokens")
    assert found["cell"] == f"{found['when']} layer 1, expert 5 0.021 of the mean"  # 2 of 93.9, to a code's 1.5 %
    assert found["first"][0].startswith("steps 1 to ") and found["first"][1] == even
    # bins are two steps wide: the mean of steps 199 and 200, of which 200 was skipped, is step 199's
    steps_199, steps_399, steps_299 = found["at"]
    assert steps_399.startswith("400K tokens steps 399 to 400 training 7.6005 (7.6 to 7.601)"), steps_399
    assert steps_199.startswith("200K tokens steps 199 to 200, 1 skipped training 7.801 "), steps_199
    assert steps_299.endswith("held out, step 300 8.2") and "steps 299 to 300, 1 skipped" in steps_299
    assert {panel["title"]: panel["faint"] for panel in found["smoothed"]}["MTP losses"] == 2
    begin, end, hidden, zoomed = found["zoomed"]
    assert (begin, end) == pytest.approx((400000, 600000), rel=1e-3) and hidden is False
    assert "600K" in zoomed[0]["labels"] and "200K" not in zoomed[0]["labels"] and not zoomed[0]["broken"]
    assert found["back"] == [2000, 700000]
    canvases = found["canvases"]
    assert canvases["load-map"] > 8 and canvases["load-layer-map"] > 2 and canvases["load-scale"] > 30


def test_two_runs_on_a_phone(tmp_path):
    a, b = whole_run(tmp_path / "a", 40), write_run(tmp_path / "b", [row(step, layers=2) for step in range(1, 31)])
    assert main(["report", f"run={a},{b}", f"out={tmp_path / 'both.html'}"]) == 0
    found = look(tmp_path / "both.html", 390, """
    found.loads = document.getElementById("load-run").options.length;
    document.getElementById("load-run").value = 1;
    document.getElementById("load-run").dispatchEvent(new Event("change"));
    found.layers = [...document.getElementById("load-layer").options].map(option => option.text);
    document.querySelector("input[data-run='0']").click();
    found.without = panelsNow().map(panel => [panel.title, panel.lines, panel.broken]);
    """, tmp_path)
    check(found, 390)
    panels = {panel["title"]: panel for panel in found["panels"]}
    assert panels["Main loss"]["lines"] == 2 and panels["MTP losses"]["lines"] == 4
    assert "a, step 40" in found["tips"][0] and "b, step 30" in found["tips"][0] and "7.96" in found["tips"][0]
    assert found["loads"] == 2 and found["layers"] == ["MoE 0", "MoE 1"]
    assert ["Main loss", 1, False] in found["without"] and ["Shares of the tasks", 0, False] in found["without"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(steps, tmp_path):
    rows = [row(1, layers=1, loss_main=None, loss_mtp=[], grad_norm=0.0, skipped=True, tokens=0)][:steps]
    folder = write_run(tmp_path / "run", rows)
    assert main(["report", f"run={folder}"]) == 0
    found = look(folder / "report.html", 1440, "", tmp_path)
    assert found["problems"] == [] and found["console"] == []
    assert len(found["panels"]) == 10 * steps and not any(panel["broken"] for panel in found["panels"])
