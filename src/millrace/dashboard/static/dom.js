// Elements and numbers. Text enters the page as text nodes only, so no model output is ever markup.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
    else if (key === "value") element.value = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (Number.isInteger(value)) return integer(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : digits);
}

export function integer(value) {
  if (value === null || value === undefined) return NONE;
  if (value === Infinity) return "∞";
  return Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, "\u2009");
}

// A setting that limits groups, as a number of them: it may be "2 batches" or "unbounded".
export function groupLimit(settings, key) {
  const batches = /^(\d+) batch/.exec(settings[key]);
  if (batches) return Number(batches[1]) * settings["trainer.groups_per_step"];
  return settings[key] === "unbounded" ? Infinity : settings[key];
}

export function rate(value) {
  if (value === null || value === undefined) return NONE;
  const [size, unit] = value >= 1e6 ? [1e6, "M"] : value >= 1e3 ? [1e3, "k"] : [1, ""];
  const scaled = value / size;
  return scaled.toFixed(scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2) + unit;
}

export function percent(share) {
  if (share === null || share === undefined) return NONE;
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u2009%`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const total = Math.round(seconds);
  const [hours, minutes, s] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(s)}` : `${minutes}:${two(s)}`;
}

// A time with the precision that suits `span_s`, the width of the window that it is shown in.
export function moment(seconds, span_s) {
  if (span_s >= 120) return duration(seconds);
  const digits = span_s >= 10 ? 1 : Math.min(Math.ceil(-Math.log10(span_s)) + 2, 6);
  if (seconds >= 60) return duration(Math.floor(seconds)) + (seconds % 1).toFixed(digits).slice(1);
  if (span_s >= 1) return `${seconds.toFixed(digits)} s`;
  return `${(seconds * 1000).toFixed(Math.max(digits - 3, 0))} ms`;
}

export function bytes(count) {
  const power = Math.min(Math.floor(Math.log2(Math.max(count, 1)) / 10), 3);
  return `${(count / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

export function table(columns, rows, { caption, empty = "Nothing here yet." } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const cells = (row) => columns.map((c) => h("td", { class: c.class }, c.cell(row)));
  return h(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map((c) => h("th", { class: c.class, scope: "col" }, c.name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))),
  );
}

export function bar(share, kind = "busy") {
  const width = `${(Math.min(Math.max(share, 0), 1) * 100).toFixed(1)}%`;
  return h("span", { class: `bar ${kind}` }, h("span", { style: { width } }));
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Calls `then` when the user changes between light and dark.
export function onTheme(then) {
  const query = matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", then);
  return () => query.removeEventListener("change", then);
}
