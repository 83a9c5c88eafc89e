// Batch anatomy: one row per episode of a step, from its first token to the end of the step.

import { get } from "../api.js";
import { css, h, integer, moment, number, onTheme, replace, table } from "../dom.js";
import { stepPicker } from "../steps.js";

const AXIS = 20;
const PHASES = [["tools", "--a4"], ["rest of the group", "--idle"], ["scoring", "--a5"], ["waiting in the buffer", "--w0"], ["training", "--a1"]];
const COLOUR = Object.fromEntries(PHASES);

export async function open(root, { run, params, go }) {
  const canvas = h("canvas", { role: "img", "aria-label": "Episodes of the step over time; the table below has the numbers" });
  const legend = h("div", { class: "legend" }), detail = h("output", { class: "detail" });
  const groups = h("div"), lost = h("div"), about = h("span", { class: "hint" });
  const context = canvas.getContext("2d");
  let life = null, rows = [], view = null, height = 0;
  const picker = await stepPicker(run, "lives", params.step, (step) => go("batch", { step }));
  replace(root, h("div", { class: "tools" }, picker.element, about, detail), h("div", { class: "anatomy" }, canvas), legend,
    h("h2", {}, "Groups"), groups, h("h2", {}, "Lost since the step before"), lost);

  async function load(step) {
    life = step === null ? null : await get(run, "batch", { step });
    if (!life) return void replace(groups, h("p", { class: "empty" }, "No step has recorded the times of its groups yet; runs of earlier versions have none."));
    life.groups.sort((a, b) => a.started_s - b.started_s);
    rows = life.groups.flatMap((group) => Object.entries(group.turns).map(([episode, turns]) => ({ group, episode: Number(episode), turns })));
    const newest = Math.max(...rows.flatMap((r) => r.turns.map((t) => t[4])), 0);
    const oldest = Math.min(...rows.flatMap((r) => r.turns.map((t) => t[3])).filter((v) => v >= 0), newest);
    view = { start: Math.min(...life.groups.map((g) => g.started_s), life.begin_s), end: life.end_s, newest, oldest };
    about.textContent = `${life.groups.length} groups, ${rows.length} episodes; the step trained for ${moment(life.end_s - life.begin_s, life.end_s - life.begin_s)}`;
    const versions = [...new Set(rows.flatMap((r) => r.turns.flatMap((t) => [t[3], t[4]])))].filter((v) => v >= 0).sort((a, b) => a - b);
    replace(legend, (versions.length <= 8 ? versions : [oldest, newest]).map((v) => key(shade(v), `generating, version ${v}`)),
      PHASES.map(([name, colour]) => key(`var(${colour})`, name)));
    replace(groups, groupTable(life.groups));
    replace(lost, groupTable(life.lost, true));
    draw();
  }

  const key = (colour, text) => h("span", {}, h("i", { style: { "background-color": colour } }), text);

  // Older versions are paler; versions of other models have no number.
  function shade(version) {
    if (version < 0) return css("--a6");
    const share = view.newest === view.oldest ? 1 : 0.35 + (0.65 * (version - view.oldest)) / (view.newest - view.oldest);
    return `color-mix(in srgb, ${css("--a0")} ${Math.round(share * 100)}%, ${css("--back")})`;
  }

  function draw() {
    if (!life || !canvas.clientWidth) return;
    const scale = devicePixelRatio || 1, width = canvas.clientWidth;
    height = Math.max(Math.min(Math.floor(900 / Math.max(rows.length, 1)), 14), 2);
    const gaps = life.groups.length * 2, total = AXIS + rows.length * height + gaps;
    canvas.width = width * scale;
    canvas.height = total * scale;
    canvas.style.setProperty("height", `${total}px`);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const perSecond = width / (view.end - view.start || 1);
    const x = (time_s) => (time_s - view.start) * perSecond;
    const colours = Object.fromEntries(PHASES.map(([name, value]) => [name, css(value)]));
    let y = AXIS, last = null;
    for (const row of rows) {
      if (last && last !== row.group) y += 2;
      last = row.group;
      row.y = y;
      for (const [from, to, colour] of segments(row, life, shade, colours)) {
        context.fillStyle = colour;
        context.fillRect(x(from), y, Math.max(x(to) - x(from), 0.6), height > 3 ? height - 1 : height);
      }
      y += height;
    }
    context.fillStyle = css("--dim");
    context.font = "11px system-ui";
    for (let i = 0; i <= 6; i++) {
      const time_s = view.start + ((view.end - view.start) * i) / 6;
      context.textAlign = i === 0 ? "left" : i === 6 ? "right" : "center";
      context.fillText(moment(time_s - view.start, view.end - view.start), x(time_s), 12);
    }
  }

  canvas.addEventListener("pointermove", (event) => {
    const row = rows.findLast((r) => r.y <= event.offsetY);
    if (!row || event.offsetY < AXIS) return void (detail.textContent = "");
    const tokens = row.turns.reduce((sum, turn) => sum + turn[2], 0);
    detail.textContent = `task ${row.group.number}, episode ${row.episode}: ${row.turns.length} turns, ${integer(tokens)} tokens, score ${number(row.group.scores[row.episode])}`;
  });
  const forget = onTheme(draw);
  const resized = new ResizeObserver(draw);
  resized.observe(canvas);
  await load(picker.step);
  return {
    attached: draw, navigate: async (next) => load(await picker.choose(next.step)),
    update: async () => { if (await picker.follow()) await load(picker.step); },
    close() { forget(); resized.disconnect(); },
  };
}

function segments({ group, turns }, life, shade, colours) {
  const found = [];
  let at = null;
  for (const [start, end, , first, last] of turns) {
    if (at !== null && start > at) found.push([at, start, colours.tools]);
    const middle = (start + end) / 2;
    if (first === last) found.push([start, end, shade(first)]);
    else found.push([start, middle, shade(first)], [middle, end, shade(last)]);
    at = end;
  }
  const phases = [[group.generated_s, "rest of the group"], [group.scored_s, "scoring"], [life.begin_s, "waiting in the buffer"], [life.end_s, "training"]];
  at ??= group.started_s;
  for (const [end, name] of phases) {
    if (end === null || end <= at) continue;
    found.push([at, end, colours[name]]);
    at = end;
  }
  return found;
}

function groupTable(groups, isLost = false) {
  const seconds = (from, to) => (from === null || to === null ? "–" : `${number(to - from, 2)} s`);
  const mean = (scores) => (scores.length ? scores.reduce((a, b) => a + (b ?? 0), 0) / scores.length : null);
  const tokens = (g) => Object.values(g.turns).flat().reduce((sum, turn) => sum + turn[2], 0);
  return table([
    { name: "task", class: "num", cell: (g) => integer(g.number) },
    { name: "attempt", class: "num", cell: (g) => g.tries + 1 },
    ...(isLost ? [{ name: "outcome", cell: (g) => `${g.outcome}${g.reason ? `: ${g.reason}` : ""}` }] : []),
    { name: "generating", class: "num", cell: (g) => seconds(g.started_s, g.generated_s) },
    { name: "scoring", class: "num", cell: (g) => seconds(g.generated_s, g.scored_s) },
    { name: "tokens", class: "num", cell: (g) => integer(tokens(g)) },
    { name: "score", class: "num", cell: (g) => number(mean(g.scores)) },
  ], groups, { caption: isLost ? "Lost groups" : "Groups", empty: "None." });
}
