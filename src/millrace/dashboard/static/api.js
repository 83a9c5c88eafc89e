// Requests to the server. An error carries the server's sentence.

export async function get(run, what, params = {}) {
  const response = await ask(run, what, params);
  return response.json();
}

export async function getBytes(run, what, params = {}) {
  const response = await ask(run, what, params);
  return response.arrayBuffer();
}

// Posts a request and calls `onEvent` for each event of its answer.
export async function stream(run, what, body, signal, onEvent) {
  const headers = { "Content-Type": "application/json" };
  const response = await checked(fetch(urlOf(run, what), { method: "POST", headers, body: JSON.stringify(body), signal }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const data of events.map((event) => event.slice(6)).filter((data) => data !== "[DONE]")) {
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      onEvent(event);
    }
  }
}

const urlOf = (run, what) => `/runs/${encodeURIComponent(run)}/${what}`;

async function ask(run, what, params) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined);
  return checked(fetch(`${urlOf(run, what)}?${new URLSearchParams(given)}`));
}

async function checked(request) {
  const response = await request;
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error?.message ?? `The server answered ${response.status}.`);
}

// Calls `onRuns(heads)` at once and whenever a run has news, `onLost(isLost)` when the server goes.
// A hidden page does not listen: a browser opens only six connections to a server for all its tabs.
export function listen(onRuns, onLost) {
  let source = null;
  function connect() {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource("/events");
    source.onmessage = (event) => {
      onLost(false);
      const { runs } = event.data === "[DONE]" ? {} : JSON.parse(event.data);
      if (runs) onRuns(runs);
    };
    source.onerror = () => onLost(true);
  }
  document.addEventListener("visibilitychange", connect);
  connect();
}
