// The frame of the page: which run, which view, and news from the server.

import { listen } from "./api.js";
import { h, integer, replace } from "./dom.js";

const VIEWS = [
  ["overview", "Overview"], ["flow", "Flow"], ["timeline", "Timeline"], ["batch", "Batch"],
  ["episodes", "Episodes"], ["tokens", "Tokens"], ["ledger", "Ledger"], ["compare", "Compare"],
  ["logs", "Logs"], ["chat", "Chat"],
];
const STATES = {
  running: "running", finished: "finished", stopped: "stopped", waiting: "no run yet",
  copied: "copy of a running run",
};

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const runs = document.getElementById("run");
const state = document.getElementById("state");
let heads = [];
let current = null; // {view, run, instance}
let opening = 0;

replace(nav, VIEWS.map(([, title], i) => h("a", { href: "#", "aria-keyshortcuts": String((i + 1) % 10) }, title)));
history.replaceState(null, "", location.pathname + location.hash); // the cookie has the token now

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const params = Object.fromEntries(new URLSearchParams(query));
  const view = VIEWS.some(([name]) => name === path) ? path : "overview";
  const run = heads.some((head) => head.id === params.run) ? params.run : heads[0]?.id;
  return { view, run, params };
}

export function go(view, params = {}) {
  const query = new URLSearchParams({ run: current?.run ?? heads[0]?.id ?? "", ...params });
  location.hash = `#/${view}?${query}`;
}

async function open() {
  const { view, run, params } = route();
  if (run === undefined) return;
  const number = ++opening;
  const same = current && current.view === view && current.run === run;
  if (same && current.instance.navigate) return current.instance.navigate(params);
  main.classList.add("loading");
  const module = await import(`./views/${view}.js`);
  if (number !== opening) return; // the user has gone on
  const root = h("div", { class: `view ${view}` });
  const context = { run, params, go, runs: () => heads, head: () => heads.find((x) => x.id === run) };
  const instance = await attempt(root, () => module.open(root, context));
  if (number !== opening) return instance.close?.();
  current?.instance.close?.();
  current = { view, run, instance };
  main.classList.remove("loading");
  replace(main, root);
  document.title = `${VIEWS.find(([name]) => name === view)[1]} · Millrace`;
  current.instance.attached?.();
  showFrame();
}

async function attempt(root, action) {
  try {
    return (await action()) ?? {};
  } catch (error) {
    replace(root, h("p", { class: "problem", role: "alert" }, error.message));
    return {};
  }
}

function showFrame() {
  const head = heads.find((x) => x.id === current?.run);
  [...nav.children].forEach((link, i) => { // kept, because one may have the focus
    link.href = `#/${VIEWS[i][0]}?run=${current?.run ?? ""}`;
    if (VIEWS[i][0] === current?.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  if (!head) return;
  const names = heads.map((x) => h("option", { value: x.id, title: x.path }, label(x)));
  if (runs.options.length !== names.length) replace(runs, names);
  runs.value = head.id;
  const of = head.steps ? ` of ${integer(head.steps)}` : "";
  state.className = `state ${head.state}`;
  state.textContent = `${STATES[head.state]} · step ${integer(head.step)}${of}`;
}

function label(head) {
  const twins = heads.filter((other) => other.name === head.name).length > 1;
  return twins ? head.path : head.name;
}

runs.addEventListener("change", () => {
  const { view } = route();
  location.hash = `#/${view}?run=${runs.value}`;
});
addEventListener("hashchange", open);
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const chosen = /^[0-9]$/.test(event.key) ? VIEWS[(Number(event.key) + 9) % 10] : null;
  if (chosen) go(chosen[0]);
  const step = { "[": -1, "]": 1 }[event.key];
  if (step && heads.length > 1) {
    const place = heads.findIndex((x) => x.id === current.run);
    go(current.view, { run: heads[(place + step + heads.length) % heads.length].id });
  }
});

listen(
  (news) => {
    const before = new Map(heads.map((x) => [x.id, x.changes]));
    heads = news;
    if (!current) return open();
    showFrame();
    const changed = heads.filter((x) => before.get(x.id) !== x.changes).map((x) => x.id);
    const isMine = changed.includes(current.run) || current.view === "compare";
    if (isMine) Promise.resolve(current.instance.update?.(changed)).catch((error) => console.warn(error.message));
  },
  (isLost) => document.body.classList.toggle("lost", isLost),
);
