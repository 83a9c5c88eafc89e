// Tokens: each token of an episode, coloured by what engine and trainer know of it.

import { get } from "../api.js";
import { h, integer, number, replace } from "../dom.js";
import { readable } from "../text.js";
import { stepPicker } from "../steps.js";

// values(rollout) -> a number or null per token; middle: the value without colour, for two colours
const COLOURINGS = {
  version: { values: (r) => r.versions.map((v) => (v < 0 ? null : v)), digits: 0 },
  logprob: { values: (r) => sampled(r, r.engine_logprobs), low: "--c1" },
  entropy: { values: (r) => sampled(r, r.entropies) },
  ratio: { values: (r) => both(r, (t, e) => Math.exp(t - e)), middle: 1 },
  advantage: { values: (r, episode) => sampled(r, r.advantages ?? r.ids.map(() => episode.advantage)), middle: 0 },
  mismatch: { values: (r) => both(r, (t, e) => t - e), middle: 0 },
  "kept set": { values: (r) => sampled(r, r.kept?.map((n) => n || null)), digits: 0 },
  routes: { values: (r) => r.routes?.map((layers) => layers[0]?.[0] ?? null), isName: true, digits: 0 },
};
const NAMES = { mismatch: "mismatch (trainer − engine logprob)", routes: "routes (first expert of the first listed layer)" };

const sampled = (r, column) => column?.map((value, i) => (r.trained[i] ? value : null));
function both(r, combine) {
  return r.trainer_logprobs?.map((t, i) => (t === null || !r.trained[i] ? null : combine(t, r.engine_logprobs[i])));
}

export async function open(root, { run, params, go }) {
  let episode = null, rollout = null, place = Number(params.place ?? 0), elements = [];
  const episodes = h("select", { "aria-label": "Episode", onchange: () => go("tokens", { step: picker.step, place: episodes.value }) });
  const rollouts = h("select", { "aria-label": "Rollout", onchange: () => showRollout(Number(rollouts.value)) });
  const by = h("select", { "aria-label": "Colour", onchange: colour });
  const scale = h("span", { class: "scale" }), text = h("div", { class: "token-text", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys choose one" });
  const panel = h("dl", { class: "token-panel", "aria-live": "polite" }), note = h("p", { class: "hint" });
  const picker = await stepPicker(run, "samples", params.step, (step) => go("tokens", { step, place: 0 }));
  replace(root, h("div", { class: "tools" }, picker.element, h("label", {}, "Episode ", episodes), h("label", {}, "Rollout ", rollouts), h("label", {}, "Colour by ", by), scale),
    note, h("div", { class: "tokens-body" }, text, panel));

  async function load(step) {
    const list = step === null ? [] : (await get(run, "episodes", { step })).episodes;
    place = Math.min(place, Math.max(list.length - 1, 0));
    replace(episodes, list.map((e) => h("option", { value: e.place }, `task ${e.group}, episode ${e.episode}, score ${number(e.score, 2)}`)));
    episodes.value = String(place);
    episode = list.length ? await get(run, "episode", { step, place }) : null;
    replace(rollouts, (episode?.rollouts ?? []).map((r, i) => h("option", { value: i }, `${i + 1}${r.agent ? `: ${r.agent}` : ""} (${integer(r.num_tokens)} tokens)`)));
    showRollout(0);
  }

  function showRollout(index) {
    rollout = episode?.rollouts[index] ?? null;
    replace(text);
    replace(panel);
    elements = [];
    if (!rollout) return void (note.textContent = episode ? "This run recorded no tokens." : "No episode was sampled yet (monitoring.samples_per_step).");
    const cut = rollout.num_tokens - rollout.ids.length;
    note.textContent = cut > 0 ? `The last ${integer(cut)} of ${integer(rollout.num_tokens)} tokens were not recorded.` : "";
    elements = rollout.texts.map((token, i) => h("span", { class: rollout.trained[i] ? "token" : "token given", "data-i": i }, visible(token)));
    text.append(...elements);
    const usable = Object.keys(COLOURINGS).filter((name) => COLOURINGS[name].values(rollout, episode)?.some((v) => v !== null));
    const before = by.value;
    replace(by, usable.map((name) => h("option", { value: name }, NAMES[name] ?? name)));
    by.value = usable.includes(before) ? before : usable[0];
    colour();
    choose(rollout.trained.indexOf(1));
  }

  function colour() {
    const { values, middle, low, isName, digits } = COLOURINGS[by.value] ?? {};
    const column = values?.(rollout, episode) ?? [];
    const known = column.filter((v) => v !== null && Number.isFinite(v)).sort((a, b) => a - b);
    const [least, most] = [known[Math.floor(known.length * 0.01)], known[Math.ceil(known.length * 0.99) - 1] ?? known.at(-1)];
    const far = middle === undefined ? 0 : Math.max(Math.abs(least - middle), Math.abs(most - middle)) || 1;
    elements.forEach((element, i) => {
      const value = column[i];
      let found = "transparent";
      if (value !== null && value !== undefined) {
        if (isName) found = mix(`--c${value % 8}`, 0.45);
        else if (middle !== undefined) found = mix(value > middle ? "--c0" : "--c1", Math.min(Math.abs(value - middle) / far, 1) * 0.7);
        else found = mix(low ?? "--c0", 0.08 + 0.62 * share(value, least, most, low));
      }
      element.style.setProperty("background-color", found);
    });
    const end = (v, name) => h("span", {}, h("i", { style: { "background-color": name } }), number(v, digits === 0 ? 1 : 3));
    const two = middle !== undefined;
    replace(scale, known.length && !isName ? [end(two ? middle - far : least, two ? mix("--c1", 0.7) : mix(low ?? "--c0", low ? 0.7 : 0.08)), " … ",
      end(two ? middle + far : most, two ? mix("--c0", 0.7) : mix(low ?? "--c0", low ? 0.08 : 0.7))] : "");
  }

  function choose(i) {
    if (!rollout || !(i >= 0 && i < elements.length)) return;
    elements.forEach((element) => element.classList.contains("chosen") && element.classList.remove("chosen"));
    elements[i].classList.add("chosen");
    text.dataset.at = i;
    const rows = [["token", `${i} of ${integer(rollout.num_tokens)}`], ["text", h("code", {}, readable(JSON.stringify(rollout.texts[i])))], ["id", rollout.ids[i]],
      ["origin", rollout.versions[i] < 0 ? (rollout.versions.slice(0, i).some((v) => v >= 0) ? "environment or tool" : "prompt") : "sampled"]];
    for (const [name, { values, digits }] of Object.entries(COLOURINGS)) {
      const value = values(rollout, episode)?.[i];
      if (value !== null && value !== undefined && name !== "routes") rows.push([name, number(value, digits === 0 ? 0 : 4)]);
    }
    if (rollout.trainer_logprobs?.[i] != null) rows.push(["trainer logprob", number(rollout.trainer_logprobs[i], 4)]);
    if (rollout.routes?.[i]) rollout.routes[i].forEach((experts, l) => rows.push([`experts of layer ${rollout.routed_layers[l]}`, experts.join(", ")]));
    replace(panel, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  text.addEventListener("pointerover", (event) => event.target.dataset?.i && choose(Number(event.target.dataset.i)));
  text.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20 }[event.key];
    if (!move) return;
    event.preventDefault();
    choose(Math.min(Math.max(Number(text.dataset.at ?? 0) + move, 0), elements.length - 1));
    elements[Number(text.dataset.at)].scrollIntoView({ block: "nearest" });
  });
  await load(picker.step);
  return {
    navigate: async (next) => { place = Number(next.place ?? 0); await load(await picker.choose(next.step)); },
    update: () => picker.follow().then((isNew) => isNew && params.place === undefined && load(picker.step)),
  };
}

function share(value, least, most, isReversed) {
  const found = most === least ? 1 : Math.min(Math.max((value - least) / (most - least), 0), 1);
  return isReversed ? 1 - found : found;
}

const mix = (name, part) => `color-mix(in srgb, var(${name}) ${Math.round(part * 100)}%, transparent)`;
const visible = (token) => readable(token).replaceAll("\n", "⏎\n") || "\u2009";
