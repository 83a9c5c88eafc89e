// Flow: the pipeline from task to weights, where groups queue, and who waits for whom.

import { get } from "../api.js";
import { bar, groupLimit, h, integer, number, percent, rate, replace, table } from "../dom.js";

export async function open(root, { run }) {
  async function update() {
    const { row, recent, settings, diagnosis } = await get(run, "overview");
    replace(root, h("div", { class: "diagnosis" }, h("p", {}, diagnosis.sentence)),
      h("div", { class: "stages" }, stages(row, settings).map((s, i) => [i > 0 && arrow(s.flow), stage(s)])),
      h("p", { class: "loop" }, `↺ version ${integer(row.version)} goes back to the engines, between two forward passes`),
      h("h2", {}, "Who waits for whom ", h("small", {}, "mean of the newest 20 steps")), waits(row, recent),
      h("h2", {}, "Staleness at each gate ", h("small", {}, "in versions")), gates(row, settings));
  }
  await update();
  return { update };
}

function under(row, prefix) {
  const start = `${prefix}/`;
  return Object.entries(row).filter(([key]) => key.startsWith(start)).map(([key, v]) => [key.slice(start.length), v]);
}

const total = (pairs) => pairs.reduce((sum, [, value]) => sum + (value ?? 0), 0);

function stages(row, settings) {
  const perStep = settings["trainer.groups_per_step"];
  const running = row["groups/running"], most = groupLimit(settings, "rollout.max_running_groups");
  const depth = row["buffer/depth"], capacity = groupLimit(settings, "buffer.capacity");
  const scorers = [...new Set(under(row, "scorer").map(([key]) => key.split("/")[0]))];
  const waiting = scorers.reduce((sum, name) => sum + (row[`scorer/${name}/waiting`] ?? 0), 0);
  return [
    { name: "Tasks", lines: [["running groups", `${integer(running)} / ${integer(most)}`, running / most],
      ["held", `${number(row["buffer/admission_held_s"], 1)} s so far`],
      ["dropped", integer(total(under(row, "dropped")))], ["failed", integer(total(under(row, "failed")))]] },
    { name: "Engines", flow: `${integer(running)} groups`, lines: [["busy", percent(row["busy/engine"]), row["busy/engine"]],
      ["tokens/s", rate(row["throughput/tokens_per_s"])], ["completion", `${number(row["completion_length/mean"], 1)} tokens`],
      ["cancelled as too stale", integer(total(under(row, "cancelled")))]] },
    { name: "Scorers", flow: `${integer(waiting)} waiting`, lines: scorers.flatMap((name) => [
      [name, percent(row[`scorer/${name}/busy`]), row[`scorer/${name}/busy`]],
      ["in flight", `${integer(row[`scorer/${name}/in_flight`])} / ${integer(row[`scorer/${name}/concurrency`])}`],
      ["wait", `${number(row[`scorer/${name}/wait_s`], 2)} s`]]) },
    { name: "Buffer", flow: depth >= capacity ? "full: generation stops" : "", isBlocked: depth >= capacity,
      lines: [["groups", `${integer(depth)} / ${integer(capacity)}`, depth / capacity],
        ["wait", `${number(row["buffer/wait_s"], 1)} s`], ["batch", `${integer(perStep)} groups`]] },
    { name: "Trainer", flow: `${integer(perStep)} groups`, lines: [["busy", percent(row["busy/trainer"]), row["busy/trainer"]],
      ["samples/s", rate(row["throughput/samples_per_s"])], ["step", integer(row.step)],
      ["staleness", `${number(row["staleness/mean"], 2)}, max ${integer(row["staleness/max"])}`]] },
  ];
}

function stage({ name, lines, isBlocked }) {
  return h("section", { class: `stage${isBlocked ? " blocked" : ""}` }, h("h3", {}, name),
    h("dl", {}, lines.map(([key, value, share]) => h("div", {}, h("dt", {}, key), h("dd", {}, value),
      share !== undefined && !Number.isNaN(share) && bar(share)))));
}

function arrow(text) {
  return h("div", { class: "arrow" }, h("span", {}, "→"), text && h("small", {}, text));
}

function waits(row, recent) {
  const workers = new Map();
  for (const [key, share] of under(recent, "waiting")) {
    const [worker, ...reason] = key.split("/");
    if (!workers.has(worker)) workers.set(worker, []);
    workers.get(worker).push([reason.join("/").replaceAll("_", " "), share]);
  }
  const rows = [...workers].map(([worker, reasons]) => ({ worker, reasons: reasons.sort((a, b) => b[1] - a[1]) }));
  return table([
    { name: "worker", cell: (r) => r.worker },
    { name: "busy", class: "num", cell: (r) => percent(1 - total(r.reasons)) },
    { name: "", cell: (r) => bar(1 - total(r.reasons)) },
    { name: "waits for", cell: (r) => r.reasons.filter(([, share]) => share >= 0.005).map(([reason, share]) =>
      h("span", { class: "reason" }, bar(share, reason === "no work" ? "idle" : "wait"), ` ${reason} ${percent(share)}`)) },
  ], rows, { caption: "Waits of the workers", empty: "No worker has waited in the last 15 s." });
}

function gates(row, settings) {
  const limit = settings["buffer.max_staleness"];
  const list = (prefix) => under(row, prefix).filter(([, n]) => n).map(([key, n]) => `${key} ${integer(n)}`).join(", ") || "none";
  const shares = under(row, "staleness/share").sort((a, b) => a[0] - b[0]);
  return table([
    { name: "gate", cell: (r) => r[0] }, { name: "rule", cell: (r) => r[1] }, { name: "so far", cell: (r) => r[2] },
  ], [
    ["Admission", `no group starts that would be older than ${limit} when it is trained`, `held for ${number(row["buffer/admission_held_s"], 1)} s`],
    ["Cancellation", "a running group that became too stale is cancelled", list("cancelled")],
    ["Batch selection", `nothing staler than ${limit} leaves the buffer`, list("dropped")],
    ["Loss", "staleness of the tokens of the last step", shares.map(([s, share]) =>
      h("span", { class: "reason" }, bar(share), ` ${s}: ${percent(share)}`))],
  ], { caption: "Gates" });
}
