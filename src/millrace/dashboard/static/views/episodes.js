// Episodes: what the model was asked, what it said, and how it was scored; groups side by side.

import { get } from "../api.js";
import { h, integer, number, replace } from "../dom.js";
import { readable } from "../text.js";
import { stepPicker } from "../steps.js";

const SORTS = { "in the order of the file": () => 0, "lowest score first": (a, b) => a.score - b.score, "highest score first": (a, b) => b.score - a.score, "longest first": (a, b) => b.tokens - a.tokens };
const LONG = 20000; // characters that are shown at once

export async function open(root, { run, params, go }) {
  let found = [], group = params.group ?? null;
  const list = h("div", { class: "episode-list", role: "list" }), detail = h("div", { class: "episode-detail" });
  const note = h("span", { class: "hint" });
  const sort = h("select", { "aria-label": "Order", onchange: showList }, Object.keys(SORTS).map((name) => h("option", { value: name }, name)));
  const text = h("input", { type: "search", placeholder: "search all steps …", "aria-label": "Search all steps", value: params.text ?? "" });
  const low = h("input", { type: "number", step: "any", placeholder: "score from", "aria-label": "Lowest score", oninput: showList });
  const high = h("input", { type: "number", step: "any", placeholder: "to", "aria-label": "Highest score", oninput: showList });
  const form = h("form", { class: "picker", onsubmit: (event) => {
    event.preventDefault();
    load(picker.step);
  } }, text, h("button", {}, "Search"));
  const picker = await stepPicker(run, "samples", params.step, (step) => { text.value = ""; go("episodes", { step }); });
  replace(root, h("div", { class: "tools" }, picker.element, form, low, high, sort, note), h("div", { class: "episodes-body" }, list, detail));

  async function load(step) {
    const words = text.value.trim();
    if (words) {
      const answer = await get(run, "episodes", { text: words });
      found = answer.episodes;
      note.textContent = `${found.length} episodes, searched from the newest step down to step ${answer.down_to}`;
    } else {
      found = step === null ? [] : (await get(run, "episodes", { step })).episodes;
      note.textContent = "";
    }
    showList();
    const first = (group !== null && found.find((e) => String(e.group) === group)) || shown()[0];
    if (first) await showGroup(first);
    else replace(detail, h("p", { class: "empty" }, words ? "Nothing was found." : "No episode was sampled yet (monitoring.samples_per_step)."));
  }

  function shown() {
    const isIn = (e) => (low.value === "" || e.score >= Number(low.value)) && (high.value === "" || e.score <= Number(high.value));
    return found.filter(isIn).sort(SORTS[sort.value]);
  }

  function showList() {
    replace(list, shown().map((episode) => h("button", {
      type: "button", role: "listitem", class: "episode-row", "data-key": keyOf(episode), onclick: () => showGroup(episode),
    }, h("span", { class: "num" }, number(episode.score, 2)), h("span", { class: "excerpt" }, readable(episode.completion) || "(empty)"),
      h("small", {}, `step ${episode.step} · task ${integer(episode.group)} · ${integer(episode.tokens)} tokens`))));
  }

  const keyOf = (e) => `${e.step}/${e.place}`;

  async function showGroup(chosen) {
    for (const row of list.children) row.setAttribute("aria-pressed", String(row.dataset.key === keyOf(chosen)));
    const members = found.filter((e) => e.group === chosen.group && e.step === chosen.step);
    const whole = await Promise.all(members.map(({ step, place }) => get(run, "episode", { step, place })));
    const place = members.indexOf(chosen);
    replace(detail, h("h2", {}, `Task ${integer(chosen.group)} `, h("small", {}, `${members.length} of ${whole[0].group_scores.length || members.length} episodes were sampled`)),
      scores(whole[place]), prompt(whole[place]), tree(whole),
      h("div", { class: "side-by-side" }, whole.map((episode, i) => card(episode, members[i], i === place))));
  }

  function card(episode, { step, place }, isChosen) {
    const turns = episode.turns.length ? episode.turns : [{ agent: "", completion: episode.completion, finish: episode.finish }];
    return h("article", { class: `card${isChosen ? " chosen" : ""}` },
      h("header", {}, h("b", {}, `score ${number(episode.score)}`), h("span", {}, `advantage ${number(episode.advantage)}`),
        h("a", { href: `#/tokens?run=${run}&step=${step}&place=${place}` }, "tokens")),
      h("dl", { class: "parts" }, Object.entries(episode.parts).map(([name, value]) => [h("dt", {}, name), h("dd", {}, number(value))])),
      turns.map(({ agent, completion, finish }, i) => h("section", { class: "said" },
        h("small", {}, [turns.length > 1 && `turn ${i + 1}`, agent, finish].filter(Boolean).join(" · ")), long(completion))),
      h("footer", {}, h("small", {}, `episode ${episode.episode} · ${integer(episode.tokens)} tokens · versions ${episode.versions.join("–")} · ${episode.ending}`)));
  }

  await load(picker.step);
  return {
    navigate: async (next) => { group = next.group ?? null; await load(await picker.choose(next.step)); },
    update: async () => { if (!text.value && (await picker.follow())) await load(picker.step); },
  };
}

function scores({ group_scores: all, episode }) {
  if (all.length < 2) return null;
  const most = Math.max(...all.map((s) => Math.abs(s ?? 0)), 1e-9);
  return h("div", { class: "group-scores", title: "Scores of all episodes of the group" }, all.map((s, i) => h("span", {
    class: i === episode ? "chosen" : "", title: number(s), style: { height: `${4 + 24 * (Math.abs(s ?? 0) / most)}px` },
  })));
}

function prompt({ prompt: given, columns }) {
  const messages = typeof given === "string" ? [{ role: "prompt", content: given }] : given;
  return h("details", { open: true }, h("summary", {}, "Prompt and columns of the task"),
    messages.map((m) => h("section", { class: `said ${m.role}` }, h("small", {}, m.role),
      long(typeof m.content === "string" ? m.content : JSON.stringify(m.content, null, 1)),
      m.tool_calls && long(JSON.stringify(m.tool_calls, null, 1)))),
    Object.keys(columns).length > 0 && long(JSON.stringify(columns, null, 1)));
}

// Branches of a group: each episode below the one that it left, with the place where it left.
function tree(episodes) {
  const nodes = episodes.filter((e) => e.branching);
  if (!nodes.length) return null;
  const below = (parent) => nodes.filter((e) => e.branching.parent === parent);
  const known = new Set(nodes.map((e) => e.branching.number));
  const roots = nodes.filter((e) => e.branching.parent === null || !known.has(e.branching.parent));
  const branch = (e) => h("li", {}, `episode ${e.branching.number}`, e.branching.parent !== null && h("small", {}, ` from token ${integer(e.branching.place)}`),
    ` · score ${number(e.score, 2)} · advantage ${number(e.advantage, 2)}`, below(e.branching.number).length > 0 && h("ul", {}, below(e.branching.number).map(branch)));
  return h("ul", { class: "tree", "aria-label": "Branches" }, roots.map(branch));
}

function long(text) {
  const element = h("pre", { class: "text" }, readable(text.slice(0, LONG)));
  if (text.length <= LONG) return element;
  const more = h("button", { type: "button", onclick: () => { element.textContent = readable(text); more.remove(); } }, `Show all ${integer(text.length)} characters`);
  return [element, more];
}
