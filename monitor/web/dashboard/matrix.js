// The similarity matrix of an alert: rows are broadcast seconds, columns reference seconds. Bright cells are similar,
// the outline is the network's mask of the copy, the line is the alignment. Every cell can be read with the pointer or
// the arrow keys.

import { address, part } from "./api.js";
import { el, put } from "./dom.js";
import { clock } from "./times.js";

const MASK_FROM = 0.3; // from this value on a cell may start a path (matching.tau)
const LEFT = 52,
  TOP = 30,
  EDGE = 10; // room for the labels, in CSS pixels
const RAMP = [
  [13, 8, 35],
  [64, 18, 92],
  [132, 32, 107],
  [199, 62, 76],
  [240, 124, 39],
  [250, 200, 60],
  [252, 250, 190],
];
const NAMES = { "tile-start": "Start", "tile-end": "End" };

export function matrixView(panel, alert, evidence, sentence, signal) {
  const tiles = (evidence?.tiles ?? []).filter((tile) => tile.similarity?.length);
  if (!tiles.length) {
    put(panel, el("h2", "Similarity matrix"), el("p.muted", sentence));
    return;
  }
  const stage = el("div.matrix");
  const tabs = el("div.segmented", { role: "group", "aria-label": "Part of the alert" });
  const layers = { mask: true, path: true };
  let view;
  const showTile = (tile) => {
    for (const tab of tabs.children) tab.setAttribute("aria-pressed", String(tab.dataset.tile === tile.name));
    view = new Matrix(stage, tile, layers, address(`alerts/${part(alert.id)}/evidence/${part(tile.name)}.png`));
    panel.dataset.tile = tile.name;
  };
  put(
    tabs,
    tiles.map((tile) =>
      el(
        "button",
        { type: "button", data: { tile: tile.name }, onclick: () => showTile(tile) },
        NAMES[tile.name] ?? tile.name,
      ),
    ),
  );
  const toggle = (name, label) =>
    el(
      "label.check",
      el("input", {
        type: "checkbox",
        checked: true,
        onchange: (event) => {
          layers[name] = event.target.checked;
          view.draw();
        },
      }),
      el("i.key", { class: name }),
      label,
    );
  put(
    panel,
    el("div.row.between.wrap", el("h2", "Similarity matrix"), tiles.length > 1 && tabs),
    el(
      "p.muted.small",
      "Broadcast seconds downwards, reference seconds to the right. A copy is a bright diagonal; its slope is the speed.",
    ),
    stage,
    el(
      "div.row.wrap.legend",
      el("span.row", "0", el("i.ramp"), "1 similarity"),
      toggle("mask", `mask from ${MASK_FROM}`),
      toggle("path", "alignment"),
    ),
  );
  showTile(tiles.find((tile) => tile.name === panel.dataset.tile) ?? tiles[0]);
  const watcher = new ResizeObserver(() => view.draw());
  watcher.observe(stage);
  addEventListener("theme", () => view.draw(), { signal });
  signal.addEventListener("abort", () => watcher.disconnect());
}

class Matrix {
  constructor(stage, tile, layers, picture) {
    this.tile = tile;
    this.layers = layers;
    this.rows = tile.similarity.length;
    this.columns = tile.similarity[0].length;
    this.onPath = new Map(tile.path.map(([row, column]) => [`${row},${column}`, true]));
    this.cell = null;
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label": `Similarity matrix, ${this.rows} broadcast seconds by ${this.columns} reference seconds. Arrow keys read its cells.`,
    });
    this.readout = el(
      "output.readout",
      { "aria-live": "polite" },
      "Point at a cell, or move through the cells with the arrow keys.",
    );
    put(
      stage,
      this.canvas,
      el(
        "div.row.between.wrap",
        this.readout,
        el("a.small", { href: picture, download: `${tile.name}.png` }, "Download as image"),
      ),
    );
    this.stage = stage;
    for (const kind of ["pointermove", "pointerdown"]) this.canvas.addEventListener(kind, (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  /** CSS pixels of one cell: large enough to be seen, and the matrix not wider than the page. */
  get size() {
    const available = this.stage.clientWidth - LEFT - EDGE;
    return Math.max(2, Math.min(18, available / this.columns));
  }

  draw() {
    const { canvas, tile, rows, columns, size } = this;
    const width = LEFT + columns * size + EDGE,
      height = TOP + rows * size + EDGE,
      ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        pen.fillStyle = colour(tile.similarity[row][column]);
        pen.fillRect(LEFT + column * size, TOP + row * size, size + 0.5, size + 0.5);
      }
    }
    if (this.layers.mask) this.outline(pen);
    if (this.layers.path) this.line(pen);
    this.labels(pen);
    if (this.cell) {
      pen.lineWidth = 2;
      pen.strokeStyle = "#fff";
      pen.strokeRect(LEFT + this.cell[1] * size - 1, TOP + this.cell[0] * size - 1, size + 2, size + 2);
      pen.strokeStyle = "#000";
      pen.strokeRect(LEFT + this.cell[1] * size - 3, TOP + this.cell[0] * size - 3, size + 6, size + 6);
    }
  }

  inMask(row, column) {
    return (this.tile.mask[row]?.[column] ?? 0) >= MASK_FROM;
  }

  /** Edges between cells inside and outside of the mask. */
  outline(pen) {
    const { size } = this;
    pen.beginPath();
    for (let row = 0; row <= this.rows; row++) {
      for (let column = 0; column <= this.columns; column++) {
        const x = LEFT + column * size,
          y = TOP + row * size,
          here = this.inMask(row, column);
        if (here !== this.inMask(row - 1, column)) {
          pen.moveTo(x, y);
          pen.lineTo(x + size, y);
        }
        if (here !== this.inMask(row, column - 1)) {
          pen.moveTo(x, y);
          pen.lineTo(x, y + size);
        }
      }
    }
    pen.lineWidth = 1.5;
    pen.strokeStyle = "#4ff0d0";
    pen.stroke();
  }

  line(pen) {
    const { size } = this;
    for (const [width, style] of [
      [4, "#000a"],
      [2, "#fff"],
    ]) {
      pen.beginPath();
      let before = null;
      for (const [row, column] of this.tile.path) {
        const x = LEFT + (column + 0.5) * size,
          y = TOP + (row + 0.5) * size;
        // Separate paths of one alert are not joined.
        if (before && Math.abs(row - before[0]) <= 4 && Math.abs(column - before[1]) <= 4) pen.lineTo(x, y);
        else pen.moveTo(x, y);
        before = [row, column];
      }
      pen.lineWidth = width;
      pen.strokeStyle = style;
      pen.stroke();
    }
  }

  labels(pen) {
    const { tile, rows, columns, size } = this;
    const style = getComputedStyle(this.canvas);
    pen.fillStyle = style.color;
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const labelStep = (n, minPixels) => [5, 10, 20, 30, 60, 120, 300].find((step) => step * size >= minPixels) ?? n;
    for (let row = 0; row < rows; row++) {
      if ((tile.live_s + row) % labelStep(rows, 24) === 0)
        pen.fillText(clock(tile.live_s + row), LEFT - 6, TOP + (row + 0.5) * size);
    }
    pen.textAlign = "center";
    for (let column = 0; column < columns; column++) {
      if ((tile.ref_s + column) % labelStep(columns, 52) === 0)
        pen.fillText(clock(tile.ref_s + column), LEFT + (column + 0.5) * size, TOP - 9);
    }
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.read(
      Math.floor((event.clientY - box.top - TOP) / this.size),
      Math.floor((event.clientX - box.left - LEFT) / this.size),
    );
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = this.cell ?? this.tile.path[0] ?? [0, 0];
    const [down, right] = this.cell ? step : [0, 0];
    this.read(
      Math.min(this.rows - 1, Math.max(0, row + down)),
      Math.min(this.columns - 1, Math.max(0, column + right)),
    );
  }

  read(row, column) {
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns) return;
    this.cell = [row, column];
    const { tile } = this;
    const similarity = tile.similarity[row][column].toFixed(2);
    const mask = (tile.mask[row]?.[column] ?? 0).toFixed(2);
    const position = `Broadcast ${clock(tile.live_s + row)}, reference ${clock(tile.ref_s + column)}`;
    const onPath = this.onPath.has(`${row},${column}`) ? ", on the alignment" : "";
    this.readout.textContent = `${position}: similarity ${similarity}, mask ${mask}${onPath}`;
    this.draw();
  }
}

function colour(value) {
  const position = Math.min(1, Math.max(0, value)) * (RAMP.length - 1),
    low = Math.min(RAMP.length - 2, Math.floor(position));
  const mix = RAMP[low].map((from, at) => Math.round(from + (position - low) * (RAMP[low + 1][at] - from)));
  return `rgb(${mix})`;
}
