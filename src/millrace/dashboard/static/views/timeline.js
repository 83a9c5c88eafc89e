// Timeline: what every worker did, from hours to milliseconds. The server sends tiles of time bins,
// a worker paints each once (tiles.js), and a frame only copies strips of these pictures.

import { get } from "../api.js";
import { css, duration, h, integer, moment, onTheme, percent, replace } from "../dom.js";

const ROWS = 16; // pixels of a track in a tile
const GAP = 4, AXIS = 22; // CSS pixels
const MAX_TILES = 256;
const COLOURS = {
  generate: "--a0", step: "--a1", publish: "--a2", swap: "--a3", checkpoint: "--a4", score: "--a5",
  start: "--starting", load: "--starting", compile: "--starting",
  generation: "--w0", scores: "--w1", "staleness limit": "--w2", "buffer full": "--w3", "next batch": "--w0",
  "no work": "--idle",
};

export async function open(root, { run }) {
  let info = await describeRun(run);
  const tiles = new Map(); // "level/index" -> {bitmap, endsAt, isLoading, isStale}
  const waiting = new Map(); // tiles that the painter works on, by number
  const painter = new Worker("/static/tiles.js", { type: "module" });
  let asked = 0;
  let view = { start: 0, end: Math.max(info.end_s, 0.001) };
  let order = [], rgba = [], frame = 0, follows = true, lane = 22, width = 0;
  let colours = {}; // of axis and marks; a frame asks the browser for no style and no layout
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Activity of the workers over time; arrow keys move, plus and minus zoom, 0 shows everything" });
  const names = h("div", { class: "names" });
  const legend = h("div", { class: "legend" });
  const detail = h("output", { class: "detail" });
  const range = h("span", { class: "range" });
  const context = canvas.getContext("2d");
  const button = (text, title, action) => h("button", { type: "button", title, "aria-label": title, onclick: action }, text);
  replace(root,
    h("div", { class: "tools" },
      button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
      button("All", "Show everything", showAll), range, detail,
      h("a", { class: "end", href: `/runs/${run}/trace.json`, download: "trace.json" }, "Download trace.json"),
      h("a", { href: "https://ui.perfetto.dev", target: "_blank", rel: "noopener noreferrer", title: "Open the downloaded file there" }, "Perfetto")),
    h("div", { class: "lanes" }, names, canvas), legend);

  const isStarting = (name) => COLOURS[name] === "--starting";

  function describe() {
    order = info.tracks.map((t, i) => i).sort((a, b) => info.tracks[a].place - info.tracks[b].place);
    lane = order.length > 12 ? 18 : order.length > 6 ? 26 : 40;
    names.style.setProperty("--lane", `${lane}px`);
    colours = { dim: css("--dim"), line: css("--line"), restart: css("--bad"), checkpoint: css("--a4") };
    rgba = info.activities.map(({ name, busy }) => colourOf(name, busy));
    replace(names, order.map((i) => h("span", { title: info.tracks[i].worker }, info.tracks[i].worker)));
    const total = info.activities.reduce((sum, a) => sum + a.seconds, 0) || 1;
    const byTime = info.activities.map((a, i) => ({ ...a, i })).sort((a, b) => b.busy - a.busy || b.seconds - a.seconds);
    replace(legend, byTime.filter((a) => !isStarting(a.name) || a.seconds / total > 0.001).map(({ name, busy, seconds, i }) =>
      h("span", {}, h("i", { style: { "background-color": rgba[i] } }), busy ? name : `waits: ${name}`, " ",
        h("small", {}, `${duration(seconds)} · ${percent(seconds / total)}`))),
      h("small", { class: "hint" }, `${integer(info.num_spans)} spans${info.is_complete ? "" : " so far"}`));
  }

  function colourOf(name, busy) {
    const known = COLOURS[name];
    if (known) return css(known);
    return css(busy ? "--a6" : "--w4");
  }

  function load(level, index) {
    const key = `${level}/${index}`;
    const found = tiles.get(key);
    if (found?.isLoading || (found && !found.isStale)) return found;
    const tile = found ?? { bitmap: null };
    Object.assign(tile, { isLoading: true, isStale: false, endsAt: (index + 1) * tileLength(level) });
    tiles.set(key, tile);
    if (tiles.size > MAX_TILES) tiles.delete(tiles.keys().next().value);
    waiting.set(++asked, tile);
    const { bins, tracks: { length: tracks }, activities } = info;
    painter.postMessage({
      number: asked, run, query: { level, index, tracks },
      info: { bins, rows: ROWS, tracks, busy: activities.map((a) => a.busy), colours: rgba },
    });
    return tile;
  }

  painter.onmessage = ({ data: { number, bitmap } }) => {
    const tile = waiting.get(number);
    waiting.delete(number);
    tile.bitmap = bitmap ?? tile.bitmap;
    tile.isLoading = false;
    schedule();
  };

  const tileLength = (level) => info.tile_s * 2 ** level;

  function draw() {
    frame = 0;
    const began = performance.now();
    const scale = devicePixelRatio || 1;
    const height = AXIS + order.length * (lane + GAP);
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.setProperty("height", `${height}px`);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const perPixel = (view.end - view.start) / width;
    drawAxis(height, perPixel);
    drawTiles(perPixel);
    drawMarkers(height, perPixel);
    const span_s = view.end - view.start;
    range.textContent = `${moment(view.start, span_s)} – ${moment(view.end, span_s)}`;
    performance.measure("timeline-frame", { start: began, end: performance.now() });
  }

  function drawTiles(perPixel) {
    const wanted = Math.ceil(Math.log2((perPixel * info.bins) / info.tile_s));
    const level = Math.min(Math.max(wanted, 0), info.max_level);
    const length = tileLength(level);
    context.imageSmoothingEnabled = false;
    const last = Math.min(Math.floor(view.end / length), Math.floor(info.end_s / length));
    for (let index = Math.max(Math.floor(view.start / length), 0); index <= last; index++) {
      const tile = load(level, index);
      const [source, from, share] = tile.bitmap ? [tile.bitmap, 0, 1] : coarser(level, index);
      if (!source) continue;
      const x0 = (index * length - view.start) / perPixel, x1 = x0 + length / perPixel;
      const left = Math.round(x0), right = Math.round(x1);
      order.forEach((track, row) => context.drawImage(
        source, from * info.bins, track * ROWS, share * info.bins, ROWS,
        left, AXIS + row * (lane + GAP), right - left, lane));
    }
  }

  function coarser(level, index) { // the part of a tile of a lower resolution, until this one arrives
    for (let up = 1; level + up <= info.max_level; up++) {
      const tile = tiles.get(`${level + up}/${Math.floor(index / 2 ** up)}`);
      if (tile?.bitmap) return [tile.bitmap, (index % 2 ** up) / 2 ** up, 1 / 2 ** up];
    }
    return [null, 0, 0];
  }

  function drawAxis(height, perPixel) {
    const span_s = view.end - view.start;
    const step = tickStep(span_s, width / 90);
    context.font = "11px system-ui";
    context.fillStyle = colours.dim;
    context.strokeStyle = colours.line;
    context.beginPath();
    for (let t = Math.ceil(view.start / step) * step; t <= view.end; t += step) {
      const x = Math.round((t - view.start) / perPixel) + 0.5;
      context.moveTo(x, AXIS - 4);
      context.lineTo(x, height);
      context.fillText(moment(t, span_s), x + 3, 12);
    }
    context.stroke();
  }

  function drawMarkers(height, perPixel) {
    for (const { kind, time_s } of info.markers) {
      if (time_s < view.start || time_s > view.end) continue;
      const x = Math.round((time_s - view.start) / perPixel) + 0.5;
      context.strokeStyle = context.fillStyle = colours[kind];
      context.beginPath();
      context.moveTo(x, AXIS - 6);
      context.lineTo(x, height);
      context.stroke();
      context.fillRect(x - 3, AXIS - 8, 6, 6);
    }
  }

  function schedule() { if (width) frame ||= requestAnimationFrame(draw); }

  function show(start, end) {
    const least = 0.0005, whole = Math.max(info.end_s, 0.001);
    const span = Math.min(Math.max(end - start, least), whole * 1.05);
    const from = Math.min(Math.max(start, -0.02 * span), Math.max(whole - span * 0.98, -0.02 * span));
    view = { start: from, end: from + span };
    follows = view.end >= info.end_s;
    schedule();
  }

  function zoom(factor, share = 0.5) {
    const span = view.end - view.start, at = view.start + span * share;
    show(at - span * factor * share, at + span * factor * (1 - share));
  }

  function showAll() { show(0, info.end_s); }

  listenTo(canvas, {
    zoom, showAll,
    pan: (share) => show(view.start + share * (view.end - view.start), view.end + share * (view.end - view.start)),
    hover: hoverer(detail, run, () => ({ info, order, view, width, lane })),
  });
  const forgetTheme = onTheme(() => {
    describe();
    for (const tile of tiles.values()) tile.isStale = true;
    schedule();
  });
  const resized = new ResizeObserver(([entry]) => {
    width = entry.contentRect.width;
    schedule();
  });
  resized.observe(canvas);
  describe();

  async function update() {
    const before = info.end_s, tracks = info.tracks.length;
    info = await describeRun(run);
    if (info.tracks.length !== tracks) tiles.clear();
    for (const tile of tiles.values()) if (!(tile.endsAt <= before)) tile.isStale = true;
    describe();
    if (follows) show(view.start <= 0 ? 0 : view.start + info.end_s - before, info.end_s);
    else schedule();
  }
  return { update, attached: schedule, close() { forgetTheme(); resized.disconnect(); cancelAnimationFrame(frame); painter.terminate(); } };
}

// Tracks and activities, with checkpoints and restarts as marks.
async function describeRun(run) {
  const [info, { keys, checkpoints }] = await Promise.all([get(run, "timeline"), get(run, "overview")]);
  const restarts = keys.filter((key) => key.startsWith("restarts/"));
  const curves = await get(run, "curves", { keys: restarts.join(","), points: 4000 });
  const place = (step) => curves.step.findIndex((s) => s >= step);
  const marks = checkpoints.filter((step) => place(step) >= 0).map((step) => (
    { kind: "checkpoint", time_s: curves.time_s[place(step)], text: `checkpoint of step ${step}` }));
  for (const key of restarts) {
    curves[key].forEach((count, i) => {
      if ((count ?? 0) > (curves[key][i - 1] ?? 0)) marks.push({ kind: "restart", time_s: curves.time_s[i], text: `${key.slice(9)} was restarted` });
    });
  }
  const [tile_s, bins, max_level] = info.scale;
  return { ...info, tile_s, bins, max_level, markers: marks };
}

function listenTo(canvas, { zoom, pan, showAll, hover }) {
  let dragged = null;
  const share = (event) => event.offsetX / canvas.clientWidth;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / canvas.clientWidth);
    else zoom(Math.exp(event.deltaY * 0.002), share(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged === null) return hover(event.offsetX, event.offsetY);
    pan((dragged - event.offsetX) / canvas.clientWidth);
    dragged = event.offsetX;
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("dblclick", showAll);
  canvas.addEventListener("keydown", (event) => {
    const action = {
      ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), "+": () => zoom(0.5), "=": () => zoom(0.5),
      "-": () => zoom(2), 0: showAll, Home: showAll,
    }[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  });
}

// Names the exact span under the pointer, or the nearest marker.
function hoverer(detail, run, state) {
  let waiting = 0, asked = 0;
  return (x, y) => {
    clearTimeout(waiting);
    const { info, order, view, width, lane } = state();
    const perPixel = (view.end - view.start) / width;
    const time_s = view.start + x * perPixel;
    const mark = info.markers.find((m) => Math.abs(m.time_s - time_s) < 4 * perPixel);
    if (mark && y < AXIS) return void (detail.textContent = `${mark.text} · ${duration(mark.time_s)}`);
    const track = order[Math.floor((y - AXIS) / (lane + GAP))];
    if (track === undefined) return void (detail.textContent = "");
    const { worker } = info.tracks[track];
    const number = ++asked;
    waiting = setTimeout(async () => {
      const span = await get(run, "span", { worker, us: Math.round(time_s * 1e6) });
      if (number !== asked) return;
      const length = span && span.end_s - span.start_s;
      detail.textContent = span
        ? `${worker} · ${span.busy ? "" : "waits: "}${span.name} · ${moment(length, length)}${span.count > 1 ? ` · ${span.count} in a row` : ""}`
        : `${worker} · no span`;
    }, 60);
  };
}

function tickStep(span_s, count) {
  const rough = span_s / Math.max(count, 1);
  const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  if (rough >= 1) return sizes.find((size) => size >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}
