// Compare: curves of several runs over steps, samples or seconds, and where their settings differ.

import { get } from "../api.js";
import { axisPicker, Chart } from "../chart.js";
import { h, integer, number, percent, rate, replace, table } from "../dom.js";

const CURVES = [
  ["Reward", "reward/mean"], ["Held-out accuracy", "eval/accuracy", { format: "share" }],
  ["Samples per second", "throughput/samples_per_s", { format: "rate", min: 0 }],
  ["Staleness, mean", "staleness/mean", { min: 0 }], ["Entropy", "entropy", { min: 0 }],
  ["Engine–trainer mismatch", "mismatch/kl_k3", { min: 0 }],
];
const OWN = new Set(["run_dir"]); // differ between any two runs
const MAX_RUNS = 8; // as many as there are colours

export async function open(root, { runs }) {
  let axis = "step", extra = "", chosen = new Set(runs().slice(0, MAX_RUNS).map((x) => x.id)), data = new Map();
  let charts = [];
  const pick = h("div", { class: "counts" });
  const grid = h("div", { class: "charts" });
  const results = h("div"), settings = h("div");
  const axes = axisPicker((key) => { axis = key; draw(); });
  const more = h("select", { "aria-label": "One more curve", onchange: () => { extra = more.value; update(); } });
  replace(root, pick, h("div", { class: "tools" }, axes, h("label", {}, "also show ", more)), grid,
    h("h2", {}, "Results"), results, h("h2", {}, "Settings that differ"), settings);

  const colour = (id) => `--c${[...chosen].indexOf(id) % MAX_RUNS}`;
  const curves = () => (extra ? [...CURVES, [extra, extra]] : CURVES);

  function draw() {
    charts.forEach(({ chart }) => chart.destroy());
    charts = curves().map(([title, key, y]) => {
      const present = [...chosen].filter((id) => data.get(id)?.curves[key]?.some((v) => v !== null));
      const series = present.map((id) => ({ label: data.get(id).overview.name, colour: colour(id), points: key.startsWith("eval/") }));
      return { chart: new Chart({ title, y, series, axis }), key, present };
    }).filter(({ present }) => present.length);
    replace(grid, charts.map(({ chart }) => chart.element));
    for (const { chart, key, present } of charts) chart.set(axis, merged(present.map((id) => data.get(id).curves), axis, key));
  }

  async function update() {
    const keys = curves().map(([, key]) => key).join(",");
    const loaded = await Promise.all([...chosen].map(async (id) => {
      const [overview, found] = await Promise.all([get(id, "overview"), get(id, "curves", { keys, points: 400 })]);
      return [id, { overview, curves: found }];
    }));
    data = new Map(loaded);
    replace(pick, runs().map((run) => h("button", {
      type: "button", "aria-pressed": String(chosen.has(run.id)), title: run.path, onclick: () => toggle(run.id),
    }, h("i", { style: { "background-color": chosen.has(run.id) ? `var(${colour(run.id)})` : "transparent" } }), run.name)));
    const names = [...new Set(loaded.flatMap(([, d]) => d.overview.keys))].sort();
    replace(more, h("option", { value: "" }, "nothing else"), names.map((name) => h("option", { value: name }, name)));
    more.value = extra;
    replace(results, resultTable(loaded));
    replace(settings, settingTable(loaded));
    draw();
  }

  function toggle(id) {
    chosen.has(id) ? chosen.delete(id) : chosen.size < MAX_RUNS && chosen.add(id);
    update();
  }

  await update();
  return { update, attached: draw, close: () => charts.forEach(({ chart }) => chart.destroy()) };
}

// One column of x for all runs, as uPlot needs it; null where a run has no point there.
function merged(runs, axis, key) {
  const all = [...new Set(runs.flatMap((curves) => curves[axis].filter((x) => x !== null)))].sort((a, b) => a - b);
  const place = new Map(all.map((x, i) => [x, i]));
  return [all, ...runs.map((curves) => {
    const column = new Array(all.length).fill(null);
    curves[axis].forEach((x, i) => { if (x !== null) column[place.get(x)] = curves[key][i] ?? null; });
    return column;
  })];
}

function resultTable(loaded) {
  const last = ({ overview, curves }) => overview.summary.accuracy_after ?? curves["eval/accuracy"].findLast((v) => v !== null);
  return table([
    { name: "run", cell: ([, d]) => d.overview.name },
    { name: "state", cell: ([, d]) => d.overview.state },
    { name: "steps", class: "num", cell: ([, d]) => integer(d.overview.step) },
    { name: "reward", class: "num", cell: ([, d]) => number(d.overview.row["reward/mean"]) },
    { name: "accuracy", class: "num", cell: ([, d]) => percent(last(d)) },
    { name: "samples/s", class: "num", cell: ([, d]) => rate(d.overview.rates.samples_per_s) },
    { name: "tokens/s", class: "num", cell: ([, d]) => rate(d.overview.rates.tokens_per_s) },
    { name: "staleness", class: "num", cell: ([, d]) => number(d.overview.row["staleness/mean"], 2) },
  ], loaded, { caption: "Results" });
}

function settingTable(loaded) {
  const keys = [...new Set(loaded.flatMap(([, d]) => Object.keys(d.overview.settings)))].sort();
  const text = (d, key) => (key in d.overview.settings ? JSON.stringify(d.overview.settings[key]) : "–");
  const different = keys.filter((key) => !OWN.has(key) && new Set(loaded.map(([, d]) => text(d, key))).size > 1);
  return table([
    { name: "setting", cell: (key) => h("code", {}, key) },
    ...loaded.map(([, d]) => ({ name: d.overview.name, cell: (key) => h("code", {}, text(d, key)) })),
  ], different, { caption: "Settings that differ", empty: loaded.length > 1 ? "All settings are equal." : "Open several runs to compare them: millrace dashboard RUN_DIR RUN_DIR." });
}
