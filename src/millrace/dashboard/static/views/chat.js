// Chat: talk to a checkpoint of the run. The dashboard loads it on the first message.

import { get, stream } from "../api.js";
import { h, replace } from "../dom.js";
import { readable } from "../text.js";

export async function open(root, { run, params }) {
  let { checkpoints } = await get(run, "overview");
  const messages = [];
  let stopping = null; // of the reply that is being written
  const step = h("select", { "aria-label": "Checkpoint" });
  const number = (label, value, step_, max) => h("input", { type: "number", "aria-label": label, value, min: 0, max, step: step_ });
  const temperature = number("Temperature", 1, 0.1, 10), length = number("Tokens at most", 256, 1, 100000);
  const status = h("span", { class: "hint", role: "status" });
  const talk = h("div", { class: "talk", "aria-live": "polite" });
  const text = h("textarea", { rows: 3, "aria-label": "Message", placeholder: "Message; Enter sends, Shift+Enter starts a line" });
  const send = h("button", { type: "button", onclick: () => (stopping ? stopping.abort() : say()) }, "Send");
  const clear = h("button", { type: "button", onclick: () => { messages.length = 0; replace(talk); } }, "New chat");
  const missing = h("p", { class: "empty" }, "This machine has no checkpoint of this run. A run writes them to checkpoints/ (setting checkpoint.every_steps); of a copied run, copy that folder as well.");
  const panel = h("div", {},
    h("div", { class: "tools" }, h("label", {}, "Step ", step), h("label", {}, "Temperature ", temperature), h("label", {}, "Tokens ", length), clear, status),
    talk, h("div", { class: "compose" }, text, send));
  replace(root, missing, panel);
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!stopping) say();
  });

  function offer() {
    missing.hidden = checkpoints.length > 0;
    panel.hidden = !checkpoints.length;
    const chosen = step.value || params.step || String(checkpoints.at(-1));
    replace(step, checkpoints.toReversed().map((n) => h("option", { value: String(n) }, String(n))));
    step.value = checkpoints.includes(Number(chosen)) ? chosen : String(checkpoints.at(-1) ?? "");
  }

  function show(role, content) {
    const body = h("pre", { class: "text" }, readable(content));
    talk.append(h("div", { class: `said ${role}` }, h("small", {}, role === "user" ? "you" : `step ${step.value}`), body));
    body.scrollIntoView({ block: "nearest" });
    return body;
  }

  async function say() {
    if (!text.value.trim()) return;
    messages.push({ role: "user", content: text.value });
    show("user", text.value);
    text.value = "";
    stopping = new AbortController();
    send.textContent = "Stop";
    const body = show("assistant", "");
    let reply = "";
    try {
      const asked = { step: Number(step.value), messages, temperature: Number(temperature.value), max_tokens: Number(length.value) };
      await stream(run, "chat", asked, stopping.signal, (event) => {
        if (event.status !== undefined) status.textContent = event.status;
        if (event.finish === "length") status.textContent = "The reply was cut at its limit of tokens.";
        reply += event.text ?? "";
        body.textContent = readable(reply);
      });
    } catch (error) {
      status.textContent = stopping.signal.aborted ? "Stopped." : error.message;
    }
    if (reply) messages.push({ role: "assistant", content: reply });
    else messages.pop();
    stopping = null;
    send.textContent = "Send";
  }

  offer();
  return {
    async update() {
      ({ checkpoints } = await get(run, "overview"));
      if (!stopping) offer();
    },
    attached: () => text.focus(),
    close: () => stopping?.abort(),
  };
}
