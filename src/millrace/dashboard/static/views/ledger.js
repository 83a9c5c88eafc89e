// Ledger: what became of every task, and why.

import { get } from "../api.js";
import { h, integer, replace, table } from "../dom.js";

export async function open(root, { run, go }) {
  const query = { status: null, number: null, before: null };
  const counts = h("div", { class: "counts" });
  const rows = h("div");
  const number = h("input", { type: "search", inputmode: "numeric", pattern: "[0-9]*", placeholder: "task number", "aria-label": "Task number" });
  const form = h("form", { class: "tools", onsubmit: (event) => {
    event.preventDefault();
    choose({ status: null, before: null, number: /^\d+$/.test(number.value) ? number.value : null });
  } }, number, h("button", {}, "Find"));
  replace(root, counts, form, rows);

  function choose(changes) {
    Object.assign(query, changes);
    return update();
  }

  async function update() {
    const ledger = await get(run, "ledger", query);
    const all = ledger.counts.reduce((sum, [, , n]) => sum + n, 0);
    const chip = (status, text, n) => h("button", {
      type: "button", "aria-pressed": String(query.status === status), onclick: () => choose({ status, before: null, number: null }),
    }, text, h("b", {}, integer(n)));
    replace(counts, chip(null, "all", all), ledger.counts.map(([status, reason, n]) =>
      chip(status, reason ? `${status}: ${reason}` : status, n)));
    const last = ledger.tasks.at(-1)?.number;
    replace(rows, table([
      { name: "task", class: "num", cell: (t) => integer(t.number) },
      { name: "status", cell: (t) => h("span", { class: `status ${t.status}` }, t.status) },
      { name: "why", cell: (t) => t.reason ?? "" },
      { name: "trained by step", class: "num", cell: (t) => (t.version === null ? "" : step(t.version)) },
      { name: "earlier attempts", class: "num", cell: (t) => t.tries || "" },
      { name: "row of the dataset", class: "num", cell: (t) => t.draw ?? "" },
    ], ledger.tasks, { caption: "Tasks", empty: query.number ? `Task ${query.number} was not issued.` : "The run has no journal, or no such task." }),
    h("div", { class: "tools" },
      query.before && h("button", { type: "button", onclick: () => choose({ before: null }) }, "Newest"),
      last > 0 && !query.number && h("button", { type: "button", onclick: () => choose({ before: last }) }, "Older")));
  }

  const step = (version) => h("a", { href: "#", onclick: (event) => {
    event.preventDefault();
    go("batch", { step: version });
  } }, integer(version));

  await update();
  return { update: () => query.before === null && update() };
}
