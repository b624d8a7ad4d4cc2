// Talks to the server: JSON, streamed answers, and errors as people can read them.

const KEY = "mistralrs-key";

/** What the server refused, or that it could not be reached (status 0). */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => stored(sessionStorage, KEY) ?? "",
  set: (value) => store(sessionStorage, KEY, value),
};

/** Reads a value that this page has kept; null without one, or where nothing may be kept. */
export function stored(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

/** Keeps a value if the browser lets us; the page works without. */
export function store(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch (error) {
    console.info(`not kept: ${name} (${error.name})`);
  }
}

/** Fetches JSON from a path relative to this page. */
export async function getJson(path) {
  const response = await ask(path, {});
  return response.json();
}

/** Yields the chunks of a chat completion as they arrive; returns once it is complete. */
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error), 500);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did.");
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw new ServerError(await complaint(response), response.status);
  return response;
}

async function complaint(response) {
  const text = await response.text();
  const after = response.headers.get("retry-after");
  const wait = after ? ` Try again in ${after} s.` : "";
  try {
    const { error, message } = JSON.parse(text);
    return (error?.message ?? message ?? text) + wait;
  } catch {
    return `${response.status} ${response.statusText}: ${text.slice(0, 300)}${wait}`;
  }
}

/** Yields the data of each server-sent event; comments and the names of events are left out. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // already broken: who reads is told by the error itself
  }
}
