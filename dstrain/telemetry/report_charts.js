// Line charts of the report: an SVG for each panel, drawn for the width that there is. Pointing at one names its
// numbers, dragging across one zooms all of them.
const view = {from: -Infinity, to: Infinity, smooth: 1, hidden: new Set()};  // hidden: numbers of runs
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 2"];
const HEIGHT = 218, LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 24;

// Colours tell runs apart where there are several, else series; dashes then tell series apart.
function paint(series, several) {
  return several ? {stroke: "var(--soft)", "stroke-dasharray": DASHES[series % DASHES.length]}
    : {stroke: `var(--c${series % 10})`, "stroke-dasharray": DASHES[Math.floor(series / 10) % DASHES.length]};
}

function dotColour(panel, point) { return `var(--c${(panel.series.length === 1 ? 1 : point) % 10})`; }

function linesOf(panel) {
  const lines = [];
  runs.forEach((run, r) => {
    if (view.hidden.has(r)) return;
    panel.series.forEach(([name, label], s) => {
      const numbers = run.series[name];
      if (!numbers) return;
      const several = runs.length > 1;
      lines.push({
        run, label: several && panel.series.length === 1 ? run.name : several ? `${run.name}, ${label}` : label,
        colour: several ? `var(--c${r % 10})` : paint(s, false).stroke, dash: paint(s, several)["stroke-dasharray"],
        x: run.tokens, raw: numbers.mean, y: panel.dots ? numbers.mean : smoothed(numbers.mean, view.smooth),
        low: numbers.low, high: numbers.high,
      });
    });
  });
  return lines;
}

function dotsOf(panel) {
  const dots = [];
  runs.forEach((run, r) => {
    if (view.hidden.has(r)) return;
    panel.points.forEach(([name, label], s) => {
      const colour = runs.length > 1 ? `var(--c${r % 10})` : dotColour(panel, s);
      const records = run.evaluations.filter(record => (record[name] ?? null) !== null);
      const whose = runs.length > 1 ? `${run.name}, ` : "";
      if (records.length) dots.push({name, records, colour, label: `${whose}${label}`});
    });
  });
  return dots;
}

function whole() {
  const shown = runs.filter((_, r) => !view.hidden.has(r));
  const all = shown.flatMap(run => [...run.tokens, ...run.evaluations.map(record => record.tokens)]);
  const low = least(all), high = most(all);
  return all.length ? [low, high > low ? high : low + 1] : [0, 1];
}

class Chart {
  constructor(figure) {
    this.panel = panels[+figure.dataset.panel];
    this.place = figure.querySelector(".chart");
    this.legend = figure.querySelector(".legend");
    this.place.addEventListener("pointermove", event => this.point(event));
    this.place.addEventListener("pointerdown", event => {
      if (event.pointerType === "mouse" && event.button === 0) {
        this.begun = this.inside(event);
        this.place.setPointerCapture(event.pointerId);
      } else this.point(event);
    });
    this.place.addEventListener("pointerup", event => this.release(event));
    this.place.addEventListener("pointerleave", () => { tip.hidden = true; rule(null); });
    this.place.addEventListener("dblclick", () => zoom(-Infinity, Infinity));
  }

  draw() {
    const panel = this.panel, [low, high] = whole();
    this.lines = linesOf(panel);
    this.dots = dotsOf(panel);
    this.width = Math.max(this.place.clientWidth, 160);
    this.from = Math.max(view.from, low);
    this.to = Math.min(view.to, high);
    const [bottom, top] = this.range();
    const scale = panel.log ? Math.log : value => value;
    const tall = HEIGHT - TOP - BOTTOM, wide = this.width - LEFT - RIGHT;
    this.y = value => TOP + tall - (scale(value) - scale(bottom)) / (scale(top) - scale(bottom)) * tall;
    this.x = tokens => LEFT + (tokens - this.from) / (this.to - this.from) * wide;
    this.place.replaceChildren();
    const box = `0 0 ${this.width} ${HEIGHT}`;
    const root = svg(this.place, "svg", {viewBox: box, height: HEIGHT, role: "img", "aria-label": panel.title});
    for (const value of ticks(bottom, top, 4, panel.log)) {
      const y = this.y(value).toFixed(1);
      svg(root, "path", {class: "gridline", d: `M${LEFT} ${y}H${this.width - RIGHT}`});
      svg(root, "text", {x: LEFT - 8, y: +y + 4, "text-anchor": "end"}, words(value, panel.percent));
    }
    svg(root, "path", {class: "axis", d: `M${LEFT} ${HEIGHT - BOTTOM}H${this.width - RIGHT}`});
    for (const value of ticks(this.from, this.to, this.width < 380 ? 3 : 5)) {
      const x = this.x(value), last = x > this.width - 30;
      const at = {x: (last ? this.width - 2 : x).toFixed(1), y: HEIGHT - 6, "text-anchor": last ? "end" : "middle"};
      svg(root, "text", at, tokensWords(value));
    }
    const clip = `clip${panels.indexOf(panel)}`;
    svg(svg(root, "clipPath", {id: clip}), "rect", {x: LEFT - 6, y: TOP - 4, width: wide + 12, height: tall + 7});
    const inner = svg(root, "g", {"clip-path": `url(#${clip})`});
    if (panel.skipped) this.drawSkipped(inner);
    for (const line of this.lines) this.drawLine(inner, line);
    for (const {records, colour, name} of this.dots)
      for (const record of records)
        svg(inner, "circle", {
          class: "evaluation", cx: this.x(record.tokens).toFixed(1), cy: this.y(record[name]).toFixed(1),
          r: record.whole ? 5 : 3, fill: record.whole ? colour : "var(--card)", stroke: colour,
        });
    this.rule = svg(root, "path", {class: "rule", visibility: "hidden", d: ""});
    this.drag = svg(root, "rect", {class: "drag", visibility: "hidden", y: TOP, height: tall});
    this.drawLegend();
  }

  // From the lines and dots in view; bands may leave it, so that one step does not flatten all others.
  range() {
    const start = this.panel.settled && view.from === -Infinity ? this.from + (this.to - this.from) / 20 : this.from;
    const inView = tokens => tokens >= start && tokens <= this.to;
    const seen = value => value !== null && value !== undefined && (!this.panel.log || value > 0);
    const values = [
      ...this.lines.flatMap(line => line.y.filter((_, i) => inView(line.x[i]))),
      ...this.dots.flatMap(({records, name}) => records.filter(e => inView(e.tokens)).map(e => e[name])),
    ].filter(seen);
    let low = least(values);
    const high = most(values);
    if (!values.length) return this.panel.log ? [1, 10] : [0, 1];
    if (this.panel.log) return high > 1.3 * low ? [low / 1.1, high * 1.1] : [low / 2, high * 2];
    if (this.panel.zero) low = Math.min(low, 0);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [this.panel.zero && low === 0 ? 0 : low - room, high + room];
  }

  // Pieces without a hole, in which tokens do not go back.
  pieces(line, values) {
    const found = [];
    let piece = [];
    values.forEach((value, i) => {
      const there = value !== null && (!this.panel.log || value > 0);
      if (piece.length && (!there || line.x[i] < line.x[piece.at(-1)])) { found.push(piece); piece = []; }
      if (there) piece.push(i);
    });
    return piece.length ? [...found, piece] : found;
  }

  drawLine(parent, line) {
    const {colour, dash} = line;
    const at = (i, values) => `${this.x(line.x[i]).toFixed(1)} ${this.y(values[i]).toFixed(1)}`;
    const along = (piece, values) => piece.map(i => at(i, values)).join("L");
    for (const piece of this.pieces(line, line.y)) {
      if (this.panel.dots || piece.length === 1) {
        for (const i of piece) {
          const [cx, cy] = at(i, line.y).split(" ");
          svg(parent, "circle", {class: "dot", cx, cy, r: 2, fill: colour});
        }
        continue;
      }
      if (line.low) {
        const low = line.low.map((value, i) => this.panel.log && value <= 0 ? line.raw[i] : value);
        const back = [...piece].reverse();
        svg(parent, "path", {class: "band", fill: colour, d: `M${along(piece, line.high)}L${along(back, low)}Z`});
      }
      if (line.y !== line.raw)
        svg(parent, "path", {class: "line faint", stroke: colour, d: `M${along(piece, line.raw)}`});
      svg(parent, "path", {class: "line", stroke: colour, "stroke-dasharray": dash, d: `M${along(piece, line.y)}`});
    }
  }

  drawSkipped(parent) {
    runs.forEach((run, r) => {
      if (view.hidden.has(r)) return;
      const colour = runs.length > 1 ? `var(--c${r % 10})` : "var(--bad)";
      run.skipped.forEach((count, i) => {
        if (!count) return;
        const x = this.x(run.tokens[i]).toFixed(1);
        svg(parent, "path", {class: "mark", stroke: colour, d: `M${x} ${TOP + 6}V${HEIGHT - BOTTOM}`});
        svg(parent, "path", {class: "flag", fill: colour, d: `M${x} ${TOP + 6}l-4 -7h8z`});
      });
    });
  }

  // Where colours tell runs apart, which the bar at the top says, dashes and shapes are named here.
  drawLegend() {
    this.legend.replaceChildren();
    const several = runs.length > 1, {series, points, skipped} = this.panel;
    const entry = (label, shape, attributes) => {
      const span = html(this.legend, "span", {});
      svg(svg(span, "svg", {viewBox: "0 0 22 8"}), shape, attributes);
      span.append(label);
    };
    const marks = skipped && runs.some(run => run.skipped.some(count => count));
    if (series.length + points.length + marks < 2) return;
    series.forEach(([, label], s) => entry(label, "path", {class: "line", d: "M0 4H22", ...paint(s, several)}));
    points.forEach(([, label], s) => {
      const stroke = several ? "var(--soft)" : dotColour(this.panel, s);
      entry(label, "circle", {class: "evaluation", cx: 11, cy: 4, r: 3, fill: "var(--card)", stroke});
    });
    const fill = several ? "var(--soft)" : "var(--bad)";
    if (marks) entry("skipped step", "path", {class: "flag", d: "M11 9l-4 -7h8z", fill});
  }

  inside(event) {
    const box = this.place.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - box.left, LEFT), this.width - RIGHT);
  }

  tokensAt(x) { return this.from + (x - LEFT) / (this.width - LEFT - RIGHT) * (this.to - this.from); }

  point(event) {
    const x = this.inside(event), tokens = this.tokensAt(x), {percent} = this.panel, several = runs.length > 1;
    if (this.begun !== undefined && this.begun !== null) {
      const [a, b] = [Math.min(this.begun, x), Math.max(this.begun, x)];
      const shown = {x: a, width: b - a, visibility: "visible"};
      for (const [key, value] of Object.entries(shown)) this.drag.setAttribute(key, value);
    }
    rule(tokens);
    tip.replaceChildren();
    html(tip, "p", {}, `${tokensWords(tokens)} tokens`);
    let told = null;
    for (const line of this.lines) {
      const i = nearest(line.x, tokens, line.raw);
      if (i === null) continue;
      if (line.run !== told) {
        const {first, last, skipped} = line.run, one = first[i] === last[i];
        const missing = skipped[i] ? `, ${one ? "" : `${skipped[i]} `}skipped` : "";
        html(tip, "p", {}, `${several ? `${line.run.name}, ` : ""}${stepsWords(first[i], last[i])}${missing}`);
        told = line.run;
      }
      const varies = line.low && line.low[i] !== line.high[i];
      const range = varies ? ` (${words(line.low[i], percent)} to ${words(line.high[i], percent)})` : "";
      tell(line.colour, line.label, words(line.raw[i], percent), range);
    }
    for (const {records, name, colour, label} of this.dots) {
      const i = nearest(records.map(record => record.tokens), tokens, records.map(record => record[name]));
      if (i === null) continue;
      const {step, whole} = records[i];
      const value = words(records[i][name], percent);
      tell(colour, `${label}, step ${step.toLocaleString("en")}`, value, whole ? " whole text" : "");
    }
    place(event);
  }

  release(event) {
    const begun = this.begun;
    this.begun = null;
    if (begun === undefined || begun === null) return;
    this.drag.setAttribute("visibility", "hidden");
    const ends = [this.tokensAt(begun), this.tokensAt(this.inside(event))].sort((a, b) => a - b);
    if (Math.abs(begun - this.inside(event)) > 8) zoom(...ends);
  }
}

const charts = [...document.querySelectorAll("figure[data-panel]")].map(figure => new Chart(figure));

function rule(tokens) {
  for (const chart of charts) {
    chart.rule.setAttribute("visibility", tokens === null ? "hidden" : "visible");
    if (tokens !== null) chart.rule.setAttribute("d", `M${chart.x(tokens).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}`);
  }
}

function drawAll() { for (const chart of charts) chart.draw(); }

function zoom(from, to) {
  Object.assign(view, {from, to});
  element("whole").hidden = from === -Infinity;
  drawAll();
}

element("smooth")?.addEventListener("change", event => { view.smooth = +event.target.value; drawAll(); });
element("whole")?.addEventListener("click", () => zoom(-Infinity, Infinity));
for (const box of document.querySelectorAll("input[data-run]"))
  box.addEventListener("change", () => { view.hidden[box.checked ? "delete" : "add"](+box.dataset.run); drawAll(); });
drawAll();
