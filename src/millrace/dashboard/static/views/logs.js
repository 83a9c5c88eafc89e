// Logs: the end of the output of every worker.

import { get } from "../api.js";
import { bytes, h, replace } from "../dom.js";

export async function open(root, { run, params }) {
  let name = params.name ?? null;
  const list = h("div", { class: "counts" });
  const filter = h("input", { type: "search", placeholder: "only lines with …", "aria-label": "Only lines with", oninput: () => show() });
  const text = h("pre", { class: "log", tabindex: "0" });
  let content = "";
  replace(root, list, h("div", { class: "tools" }, filter, h("span", { class: "hint" }, "The last 256 KiB, without control characters.")), text);

  function show() {
    const wanted = filter.value.toLowerCase();
    const lines = wanted ? content.split("\n").filter((line) => line.toLowerCase().includes(wanted)) : null;
    const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 40;
    text.textContent = (lines ? lines.join("\n") : content) || "Nothing was written.";
    if (isAtEnd) text.scrollTop = text.scrollHeight;
  }

  async function update() {
    const files = await get(run, "logs");
    name ??= files.find((file) => file.bytes)?.name ?? files[0]?.name ?? null;
    replace(list, files.map((file) => h("button", {
      type: "button", "aria-pressed": String(file.name === name), onclick: () => { name = file.name; update(); },
    }, file.name, h("b", {}, bytes(file.bytes)))));
    content = name === null ? "" : await get(run, "log", { name });
    show();
  }
  await update();
  return { update, attached: () => { text.scrollTop = text.scrollHeight; } };
}
