// Overview: the run in numbers and curves, what limits it, and what looks wrong.

import { get } from "../api.js";
import { axisPicker, Chart } from "../chart.js";
import { duration, groupLimit, h, integer, number, percent, rate, replace } from "../dom.js";

const CHARTS = [
  { title: "Reward", keys: { mean: "reward/mean", deviation: "reward/std" } },
  { title: "Held-out accuracy", keys: { accuracy: "eval/accuracy" }, y: { format: "share" }, points: true },
  { title: "Samples", unit: "per second", keys: { samples: "throughput/samples_per_s" }, y: { format: "rate", min: 0 } },
  { title: "Tokens", unit: "per second", keys: { tokens: "throughput/tokens_per_s" }, y: { format: "rate", min: 0 } },
  { title: "Staleness", unit: "versions", keys: { mean: "staleness/mean", max: "staleness/max" }, y: { min: 0 } },
  { title: "Busy", unit: "share of time", keys: { engines: "busy/engine", trainer: "busy/trainer" }, y: { format: "share", min: 0, max: 1 } },
  { title: "Entropy", unit: "nats", keys: { entropy: "entropy" }, y: { min: 0 } },
  { title: "Engine–trainer mismatch", unit: "KL, k3", keys: { kl: "mismatch/kl_k3" }, y: { min: 0 } },
  { title: "Completion length", unit: "tokens", keys: { mean: "completion_length/mean", max: "completion_length/max" }, y: { min: 0 } },
];
const POINTS = 600;

export async function open(root, { run }) {
  let axis = "step";
  let curves = null, range = {}, waiting = 0;
  const diagnosis = h("div", { class: "diagnosis", "aria-live": "polite" });
  const alerts = h("ul", { class: "alerts", "aria-label": "Alerts" });
  const figures = h("dl", { class: "figures" });
  const charts = CHARTS.map(({ title, unit, keys, y, points }) => ({
    keys: Object.values(keys),
    chart: new Chart({
      title, unit, y, onZoom: zoomed,
      series: Object.keys(keys).map((label, i) => ({ label, colour: `--c${i}`, points })),
    }),
  }));
  const axes = axisPicker((chosen) => { axis = chosen; range = {}; update(); });
  replace(root, diagnosis, alerts, figures,
    h("div", { class: "tools" }, axes,
      h("span", { class: "hint" }, "Drag to zoom, double click to show everything.")),
    h("div", { class: "charts" }, charts.map(({ chart }) => chart.element)));

  // A long run is shown with means of several steps; a part of it is fetched again with more of them.
  function zoomed(min, max) {
    clearTimeout(waiting);
    const inside = min === null ? [] : curves.step.filter((_, i) => curves[axis][i] >= min && curves[axis][i] <= max);
    if (min !== null && (!inside.length || curves.step.length < POINTS)) return;
    range = min === null ? {} : { start: Math.floor(inside[0]), end: Math.ceil(inside.at(-1)) };
    waiting = setTimeout(update, 100);
  }

  function draw() {
    for (const { keys, chart } of charts) {
      const shown = keys.some((key) => curves[key]?.some((value) => value !== null));
      chart.element.hidden = !shown;
      if (shown) chart.set(axis, [curves[axis], ...keys.map((key) => curves[key])]);
    }
  }

  async function update() {
    const keys = charts.flatMap((entry) => entry.keys).join(",");
    const [overview, found] = await Promise.all([
      get(run, "overview"), get(run, "curves", { keys, points: POINTS, ...range }),
    ]);
    curves = found;
    replace(diagnosis, h("p", {}, overview.diagnosis.sentence));
    replace(alerts, overview.alerts.map((alert) => h("li", { class: alert.kind }, alert.sentence)));
    replace(figures, figuresOf(overview, curves).map(([name, value, more]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)))));
    draw();
  }

  await update();
  return { update, attached: draw, close: () => charts.forEach(({ chart }) => chart.destroy()) };
}

function figuresOf({ row, rates, state, step, steps, summary, settings, checkpoints }, curves) {
  const last = curves["eval/accuracy"].findLast((value) => value !== null);
  const before = summary.accuracy_before;
  const accuracy = summary.accuracy_after ?? last;
  const [from, to] = [Math.max(curves.step.length - 30, 0), curves.step.length - 1];
  const perStep = (curves.time_s[to] - curves.time_s[from]) / (curves.step[to] - curves.step[from]);
  const left = state === "running" || state === "copied" ? perStep * (steps - step) : 0;
  const dropped = Object.entries(row).filter(([key]) => key.startsWith("dropped/"));
  return [
    ["Step", integer(step), steps && ` / ${integer(steps)}`],
    ["Time", duration(summary.seconds ?? row.time_s), left > 0 ? ` ${duration(left)} left` : ""],
    ["Reward", number(row["reward/mean"]), row["reward/std"] !== undefined && ` ± ${number(row["reward/std"], 2)}`],
    ["Accuracy", accuracy === undefined ? "–" : percent(accuracy),
      before !== undefined && before !== null ? ` from ${percent(before)}` : ""],
    ["Samples/s", rate(row["throughput/samples_per_s"]), rates.samples_per_s && ` mean ${rate(rates.samples_per_s)}`],
    ["Tokens/s", rate(row["throughput/tokens_per_s"]), rates.tokens_per_s && ` mean ${rate(rates.tokens_per_s)}`],
    ["Staleness", number(row["staleness/mean"], 2), ` max ${number(row["staleness/max"])}`],
    ["Buffer", integer(row["buffer/depth"]), settings["buffer.capacity"] && ` / ${integer(groupLimit(settings, "buffer.capacity"))} groups`],
    ["Dropped", integer(dropped.reduce((sum, [, n]) => sum + n, 0)), " groups"],
    ["Checkpoint", checkpoints.length ? integer(checkpoints.at(-1)) : "–", checkpoints.length ? ` of ${checkpoints.length}` : ""],
  ];
}
