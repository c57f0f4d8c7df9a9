// What the report's script has in common: the numbers, elements, words for numbers, ticks, and the tip at the pointer.
// Text of a run goes into the page as text, never as HTML.
"use strict";
const {panels, runs} = JSON.parse(document.getElementById("numbers").textContent);
const tip = document.getElementById("tip");
const element = id => document.getElementById(id);

function svg(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, name, attributes, text) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function tokensWords(value) {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]])
    if (Math.abs(value) >= unit) return `${+(value / unit).toPrecision(4)}${letter}`;
  return `${+value.toPrecision(4)}`;
}

function words(value, percent) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${+(100 * value).toPrecision(4)}%`;
  const size = Math.abs(value);
  if (size >= 1e7) return tokensWords(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(2) : `${+value.toPrecision(5)}`;
}

function stepsWords(first, last) {
  return first === last ? `step ${first.toLocaleString("en")}`
    : `steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
}

// Round numbers from low to high, about as many as asked; powers of ten on a logarithmic axis.
function ticks(low, high, count, log) {
  const found = [];
  if (log) {
    const fine = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const part of fine) {
        const value = part * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    const every = Math.ceil(found.length / (count + 2));
    return found.filter((_, i) => i % every === 0);
  }
  const raw = (high - low) / count, base = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * base).find(size => size >= raw) || 10 * base;
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function least(values) { return values.reduce((a, b) => Math.min(a, b), Infinity); }

function most(values) { return values.reduce((a, b) => Math.max(a, b), -Infinity); }

// Centred mean over so many points, of those that are there.
function smoothed(values, points) {
  if (points <= 1) return values;
  const half = points >> 1;
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - half), i + half + 1).filter(other => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

// The index of the position nearest to `tokens` that has a value.
function nearest(positions, tokens, values) {
  let best = null;
  positions.forEach((at, i) => {
    if (values[i] !== null && (best === null || Math.abs(at - tokens) < Math.abs(positions[best] - tokens))) best = i;
  });
  return best;
}

// A line of the tip.
function tell(colour, label, value, small) {
  const line = html(tip, "p", {});
  html(line, "i", {class: "swatch", style: `background:${colour}`});
  line.append(`${label} `);
  html(line, "b", {}, value);
  html(line, "em", {}, small);
}

// Shows the tip beside the pointer, inside the window.
function place(event) {
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), beside = event.clientX + 16;
  tip.style.left = `${Math.max(6, beside + box.width > innerWidth - 6 ? event.clientX - box.width - 16 : beside)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
}
