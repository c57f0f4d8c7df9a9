// Heat maps of the experts' load: layer by expert at a time that a slider chooses, and one layer over the whole run.
// Both are slices of one cube of bytes: 160 + 24 log2(load / mean of the layer); 0: not known.
const bytesOf = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const loadRuns = runs.map(({load}) => load && {...load, codes: bytesOf(load.codes)});
const EVEN = 160, PER_OCTAVE = 24;
const shareOf = code => 2 ** ((code - EVEN) / PER_OCTAVE);
const dark = matchMedia("(prefers-color-scheme: dark)");

// Blue is under the mean, red over it, violet under a tenth of it; near the mean almost the card's own ground.
function colourOf(code) {
  if (code === 0) return "transparent";
  const {starving, even, under, over} = dark.matches
    ? {starving: [226, 120, 255], even: [38, 44, 52], under: [92, 170, 255], over: [255, 128, 96]}
    : {starving: [142, 36, 170], even: [241, 241, 238], under: [18, 78, 150], over: [176, 32, 32]};
  const octaves = (code - EVEN) / PER_OCTAVE;
  if (shareOf(code) < 0.1) return `rgb(${starving})`;
  const part = Math.min(Math.abs(octaves) / 3, 1) ** 0.8;
  return `rgb(${even.map((value, i) => Math.round(value + part * ((octaves < 0 ? under : over)[i] - value)))})`;
}

// A canvas of rows and columns with labels on the left and below; pointing at a cell tells what tell(row, column) says.
function heatMap(canvas, rows, columns, rowHeight, codeOf, rowLabels, columnLabels, tellCell) {
  const left = 54, top = 5, bottom = 20, height = top + rows * rowHeight + bottom;
  const width = Math.max(canvas.getBoundingClientRect().width, 120);
  const ratio = devicePixelRatio || 1, paint = canvas.getContext("2d"), style = getComputedStyle(document.body);
  Object.assign(canvas, {width: width * ratio, height: height * ratio});
  canvas.style.height = `${height}px`;
  paint.scale(ratio, ratio);
  const cell = (width - left) / columns, palette = Array.from({length: 256}, (_, code) => colourOf(code));
  const gapX = cell > 7 ? 1 : 0, gapY = rowHeight > 7 ? 1 : 0;
  const edge = column => Math.round((left + column * cell) * ratio) / ratio;  // on whole pixels neighbours meet
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++) {
      paint.fillStyle = palette[codeOf(row, column)];
      paint.fillRect(edge(column), top + row * rowHeight, edge(column + 1) - edge(column) - gapX, rowHeight - gapY);
    }
  paint.fillStyle = style.getPropertyValue("--soft");
  paint.font = `12px ${style.fontFamily}`;
  paint.textBaseline = "middle";
  paint.textAlign = "right";
  const every = Math.ceil(14 / rowHeight);
  rowLabels.forEach((label, row) => {
    const short = label.replace(/ \(MTP (\d+)\)/, " M$1");
    if (row % every === 0) paint.fillText(short, left - 6, top + (row + 0.5) * rowHeight);
  });
  for (const [column, label] of columnLabels) {
    const [align, x] = column === 0 ? ["left", left] : column >= columns - 1 ? ["right", width]
      : ["center", left + (column + 0.5) * cell];
    paint.textAlign = align;
    paint.fillText(label, x, height - 8);
  }
  canvas.onpointermove = canvas.onpointerdown = event => {
    const box = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - box.top - top) / rowHeight);
    const column = Math.floor((event.clientX - box.left - left) / cell);
    if (row < 0 || row >= rows || column < 0 || column >= columns) { tip.hidden = true; return; }
    tip.replaceChildren();
    const code = codeOf(row, column), [head, label] = tellCell(row, column);
    html(tip, "p", {}, head);
    const limit = code === 1 ? "at most " : code === 255 ? "at least " : "";
    const share = code ? `${limit}${+shareOf(code).toPrecision(2)}` : "not known";
    tell(colourOf(code), label, share, code ? " of the mean" : "");
    place(event);
  };
  canvas.onpointerleave = () => { tip.hidden = true; };
}

function everyNth(count, most) {
  const step = ticks(0, Math.max(count - 1, 1), most).find(value => value >= 1) || 1;
  return Array.from({length: Math.ceil(count / step)}, (_, i) => [i * step, `${i * step}`]);
}

function drawLoad() {
  const load = loadRuns[+element("load-run").value], {experts, layers, codes} = load, frames = load.first.length;
  const slider = element("load-time"), frame = +slider.value, layer = +element("load-layer").value;
  const at = (f, l, e) => codes[(f * layers.length + l) * experts + e];
  const when = f => `${stepsWords(load.first[f], load.last[f])}, up to ${tokensWords(load.tokens[f])} tokens`;
  element("load-when").textContent = when(frame);
  heatMap(element("load-map"), layers.length, experts, Math.max(6, Math.min(32, Math.floor(480 / layers.length))),
    (row, column) => at(frame, row, column), layers, everyNth(experts, 8),
    (row, column) => [when(frame), `layer ${layers[row]}, expert ${column}`]);
  const [some, all] = [load.looked_at, load.steps].map(count => count.toLocaleString("en"));
  const seen = load.looked_at < load.steps ? `, from ${some} of ${all} steps, evenly spaced` : "";
  const pieces = frames === 1 ? "One piece" : `${frames} pieces`;
  element("load-note").textContent = `${pieces} of the run, up to ${tokensWords(load.tokens.at(-1))} tokens${seen}.`;
  heatMap(element("load-layer-map"), experts, frames, Math.max(2, Math.min(22, Math.floor(512 / experts))),
    (row, column) => at(column, layer, row), Array.from({length: experts}, (_, e) => `${e}`),
    [[0, tokensWords(load.tokens[0])], ...(frames > 1 ? [[frames - 1, tokensWords(load.tokens.at(-1))]] : [])],
    (row, column) => [when(column), `layer ${layers[layer]}, expert ${row}`]);
  drawScale();
}

// The colours' meaning, from a tenth to eight times the mean.
function drawScale() {
  const marks = [0.1, 0.25, 0.5, 1, 2, 4, 8], steps = 120, low = Math.log2(1 / 16), high = 3;
  const codeAt = column => Math.round(EVEN + PER_OCTAVE * (low + (column + 0.5) / steps * (high - low)));
  const columnOf = mark => Math.min(Math.round((Math.log2(mark) - low) / (high - low) * steps), steps - 1);
  heatMap(element("load-scale"), 1, steps, 12, (_, column) => codeAt(column), [""],
    marks.map(mark => [columnOf(mark), `${mark}`]), () => ["load over the mean of the layer", ""]);
}

// The layer whose load is furthest from even at the end.
function unevenLayer({layers, experts, codes}) {
  const last = codes.subarray(codes.length - layers.length * experts);
  const off = layers.map((_, l) => {
    const ofLayer = Array.from(last.subarray(l * experts, (l + 1) * experts));
    return most(ofLayer.map(code => Math.abs(code - EVEN)));
  });
  return off.indexOf(most(off));
}

function chooseRun() {
  const load = loadRuns[+element("load-run").value], slider = element("load-time"), choice = element("load-layer");
  slider.max = load.first.length - 1;
  slider.value = slider.max;
  choice.replaceChildren();
  load.layers.forEach((name, i) => html(choice, "option", {value: i}, name));
  choice.value = unevenLayer(load);
  drawLoad();
}

if (element("load-run")) {
  element("load-run").addEventListener("change", chooseRun);
  element("load-time").addEventListener("input", drawLoad);
  element("load-layer").addEventListener("change", drawLoad);
  dark.addEventListener("change", drawLoad);
  chooseRun();
}

let drawnWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnWidth) return;  // a phone's address bar changes the height alone
  drawnWidth = innerWidth;
  drawAll();
  if (element("load-run")) drawLoad();
});
