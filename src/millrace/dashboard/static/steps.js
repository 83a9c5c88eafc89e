// A choice of steps, of those that have a file. Without a choice of the user it follows the newest.

import { get } from "./api.js";
import { h, integer } from "./dom.js";

export async function stepPicker(run, kind, wanted, go) {
  let steps = (await get(run, "steps"))[kind];
  const list = h("input", { type: "number", min: 1, "aria-label": "Step", onchange: () => go(list.value) });
  const button = (text, title, move) => h("button", { type: "button", title, "aria-label": title, onclick: () => go(steps.at(move())) }, text);
  const count = h("small");
  const place = () => steps.indexOf(picker.step);
  const picker = {
    step: null,
    element: h("span", { class: "picker" }, h("label", {}, "Step ", list),
      button("‹", "Earlier step", () => Math.max(place() - 1, 0)),
      button("›", "Later step", () => Math.min(place() + 1, steps.length - 1)),
      button("Newest", "Newest step", () => -1), count),
    async choose(next) {
      if (next !== undefined) steps = (await get(run, "steps"))[kind];
      return show(next);
    },
    async follow() { // True if a newer step is shown now
      const before = picker.step, isNewest = before === steps.at(-1);
      steps = (await get(run, "steps"))[kind];
      show(isNewest || before === null ? undefined : before);
      return picker.step !== before;
    },
  };

  function show(next) {
    const number = Number(next);
    // An old step may have been thinned out; the nearest one is shown instead.
    picker.step = next === undefined ? (steps.at(-1) ?? null) : steps.reduce((best, s) => (best === null || Math.abs(s - number) < Math.abs(best - number) ? s : best), null);
    list.value = picker.step ?? "";
    count.textContent = `of ${integer(steps.length)} recorded`;
    return picker.step;
  }
  show(wanted);
  return picker;
}
