// The gateway's JSON, and streams of answers. The key is in this tab's session storage: never in an address, never in a cookie.

const PLACE = "weft.key";

export const key = {
  get: () => sessionStorage.getItem(PLACE) ?? "",
  set: (value) => (value ? sessionStorage.setItem(PLACE, value) : sessionStorage.removeItem(PLACE)),
};

export class Refusal extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(more = {}) {
  const value = key.get();
  return value ? { ...more, authorization: `Bearer ${value}` } : more;
}

async function refused(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = { message: `HTTP ${response.status}` };
  }
  return new Refusal(response.status, error.message ?? `HTTP ${response.status}`, error.code ?? "");
}

export async function read(path, query = {}, signal = undefined) {
  const search = new URLSearchParams(query).toString();
  const response = await fetch(search ? `${path}?${search}` : path, { headers: headers(), signal, credentials: "omit" });
  if (!response.ok) throw await refused(response);
  return response.json();
}

// Events of a streamed chat completion as {text, tokens}. Throws Refusal, or what fetch throws.
export async function* chat(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
    credentials: "omit",
  });
  if (!response.ok) throw await refused(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refusal(event.error.status ?? 500, event.error.message, event.error.code);
      const choice = event.choices?.[0];
      const delta = choice?.delta ?? {};
      yield { text: (delta.reasoning_content ?? "") + (delta.content ?? ""), usage: event.usage, reason: choice?.finish_reason };
    }
  }
}

// Calls `work` now and again `ms` after each end, while the page is seen and `wanted` says so. A failure doubles the pause.
export function poll(work, ms, wanted = () => true) {
  let timer = 0;
  let failures = 0;
  let running = false;
  let again = false;
  async function turn() {
    clearTimeout(timer);
    again = running;
    if (document.hidden || running || !wanted()) return;
    running = true;
    try {
      await work();
      failures = 0;
    } catch {
      failures = Math.min(failures + 1, 4);
    }
    running = false;
    timer = setTimeout(turn, again ? 0 : ms * 2 ** failures);
  }
  document.addEventListener("visibilitychange", turn);
  turn();
  return turn;
}
