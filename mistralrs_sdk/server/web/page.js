// The page as a whole: the conversation, the settings beside it, and what the keys do.

import { ServerError, getJson, key, store, stored, streamChat } from "./api.js";
import { gauge, watcher } from "./live.js";
import { make } from "./markdown.js";
import { MessageView, factsOf } from "./messages.js";

const at = (id) => document.getElementById(id);
const page = document.documentElement;
const narrow = matchMedia("(max-width: 62rem)");
const dark = matchMedia("(prefers-color-scheme: dark)");

const CHAT = "mistralrs-chat"; // what is kept, by name
const SETTINGS = "mistralrs-settings";
const THEME = "mistralrs-theme";

const NUMBERS = [
  ...["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"],
  ...["presence_penalty", "frequency_penalty", "repetition_penalty"],
];

let messages = [];
let views = [];
let running = null; // the AbortController of the answer that is being written
let taken = 0; // tokens of the conversation as it was last answered
let longest = 0; // tokens that the model takes at most
let keyRefused = false; // whether the dialog for the key was closed without one

// The conversation

async function send(text) {
  add({ role: "user", content: text });
  await answer();
}

async function answer() {
  const body = request();
  const message = { role: "assistant", content: "" };
  const view = add(message);
  const control = new AbortController();
  running = control;
  view.update(true);
  showRunning();
  announce("The model is answering.");
  const clock = { start: performance.now(), first: 0, last: 0, tokens: 0 };
  let drawing = 0;
  let reason;
  let usage;
  const facts = () => factsOf({
    usage, reason,
    tokens: clock.tokens,
    first: clock.first && (clock.first - clock.start) / 1000,
    seconds: (clock.last - clock.first) / 1000,
  });
  const redraw = () => {
    drawing = 0;
    message.facts = facts();
    follow(() => view.update(true));
  };
  try {
    for await (const chunk of streamChat(body, control.signal)) {
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const { content, reasoning_content: thought } = choice.delta ?? {};
      if (!content && !thought) continue;
      clock.last = performance.now();
      clock.first ||= clock.last;
      clock.tokens += 1;
      message.content += content ?? "";
      if (thought) message.reasoning = (message.reasoning ?? "") + thought;
      drawing ||= requestAnimationFrame(redraw);
    }
    if (usage) taken = usage.total_tokens;
    showContext();
  } catch (error) {
    if (error.name === "AbortError") reason = "canceled";
    else failed(error, message);
  }
  cancelAnimationFrame(drawing);
  message.facts = facts();
  if (views.includes(view)) follow(() => view.update());
  if (running === control) running = null;
  showRunning();
  keep();
  announce(message.error ? "" : message.content || "The answer is empty."); // an error is an alert
}

function failed(error, message) {
  if (!(error instanceof ServerError)) console.error(error);
  message.error = error.message;
  if (error.status === 401) askKey();
}

function request() {
  const given = new FormData(at("settings"));
  const system = given.get("system").trim();
  const said = messages.filter(({ role, content }) => role === "user" || content);
  const body = {
    messages: said.map(({ role, content }) => ({ role, content })),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (system) body.messages.unshift({ role: "system", content: system });
  if (at("model").value) body.model = at("model").value;
  if (at("adapter").value) body.adapter = at("adapter").value;
  for (const name of NUMBERS) if (given.get(name) !== "") body[name] = Number(given.get(name));
  if (given.get("enable_thinking")) body.enable_thinking = given.get("enable_thinking") === "true";
  if (given.get("stop")) body.stop = [given.get("stop")];
  return body;
}

function add(message) {
  const view = new MessageView(message);
  messages.push(message);
  views.push(view);
  at("messages").append(view.element);
  at("empty").hidden = true;
  at("scroll").scrollTop = at("scroll").scrollHeight;
  return view;
}

/** Forgets the messages from one on. */
function cut(from) {
  running?.abort();
  messages = messages.slice(0, from);
  for (const view of views.splice(from)) view.element.remove();
  at("empty").hidden = messages.length > 0;
  taken = 0; // until the next answer says
  showContext();
  keep();
}

function showRunning() {
  at("stop").hidden = !running;
  at("send").hidden = Boolean(running);
  at("send").disabled = !at("prompt").value.trim();
  if (document.activeElement === document.body) at("prompt").focus();
}

/** Shows how much of the longest conversation this one takes, where both are known. */
function showContext() {
  at("context-gauge").hidden = !taken || !longest;
  if (taken && longest) gauge("context", taken, longest);
}

/** Changes the conversation, and stays at its end if that was in view. */
function follow(change) {
  const view = at("scroll");
  const atEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
  change();
  if (atEnd) view.scrollTop = view.scrollHeight;
}

const announce = (text) => (at("status").textContent = text);
const keep = () => store(sessionStorage, CHAT, messages);

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (running || !text || !settingsAreValid()) return;
  at("prompt").value = "";
  grow();
  at("prompt").focus();
  send(text);
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});

at("prompt").addEventListener("input", grow);
addEventListener("pagehide", keep);
at("stop").addEventListener("click", () => running?.abort());

at("new-chat").addEventListener("click", () => {
  cut(0);
  announce("A new chat.");
  at("prompt").focus();
});

at("messages").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const index = views.findIndex((view) => view.element.contains(button));
  if (button.dataset.copy) copy(button, button.closest("figure").querySelector("code").textContent);
  else if (button.dataset.action === "copy") copy(button, messages[index].content);
  else if (button.dataset.action === "edit") {
    at("prompt").value = messages[index].content;
    cut(index);
    grow();
    at("prompt").focus();
  } else if (button.dataset.action === "retry" && settingsAreValid()) {
    cut(index);
    at("prompt").focus();
    answer();
  }
});

function grow() {
  const field = at("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  showRunning();
}

async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // browsers want https or localhost for this
  }
  setTimeout(() => (button.textContent = before), 1500);
}

// Settings

function settingsAreValid() {
  if (at("settings").checkValidity()) return true;
  showPanel(true); // a field that is not shown cannot be pointed at
  return at("settings").reportValidity();
}

function restoreSettings() {
  const kept = stored(localStorage, SETTINGS) ?? {};
  for (const field of at("settings").elements) if (field.name) field.value = kept[field.name] ?? "";
}

function keepSettings() {
  const given = Object.fromEntries(new FormData(at("settings")));
  store(localStorage, SETTINGS, given);
}

at("settings").addEventListener("input", keepSettings);
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings").addEventListener("reset", () => setTimeout(keepSettings)); // once it has been done

function showPanel(open) {
  page.dataset.panel = open ? "open" : "closed";
  at("panel-toggle").setAttribute("aria-expanded", String(open));
  const covers = open && narrow.matches;
  at("chat").inert = covers;
  if (covers) at("panel").focus();
}

at("panel-toggle").addEventListener("click", () => showPanel(page.dataset.panel === "closed"));
narrow.addEventListener("change", () => showPanel(!narrow.matches));

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("key-dialog").open) return;
  if (at("chat").inert) {
    showPanel(false);
    at("panel-toggle").focus();
  } else running?.abort();
});

function showTheme(theme) {
  if (theme) page.dataset.theme = theme;
  const isDark = theme ? theme === "dark" : dark.matches;
  at("theme").setAttribute("aria-pressed", String(isDark));
}

at("theme").addEventListener("click", () => {
  const theme = at("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark";
  store(localStorage, THEME, theme);
  showTheme(theme);
});
dark.addEventListener("change", () => showTheme(page.dataset.theme));

// Models, adapters and the key

async function loadModels() {
  const { data } = await getJson("v1/models");
  const { model: usual } = await getJson("v1/system/stats");
  const models = data.filter(({ id, parent }) => !parent && id !== "default"); // no adapters
  offer(at("model"), models.map(({ id }) => [id, shortName(id)]), usual);
}

/** Of a model that is named by its path on the server, only the end tells it from others. */
const shortName = (id) => (id.startsWith("/") ? id.split("/").at(-1) : id);

/** Fills a choice and keeps what was chosen, or takes `usual` where that is gone. */
function offer(select, choices, usual) {
  const now = JSON.stringify(choices);
  if (select.dataset.choices === now) return; // else it would close under somebody's hand
  const before = select.value;
  select.dataset.choices = now;
  select.replaceChildren(...choices.map(([value, text]) => make("option", { value }, text)));
  const kept = before && choices.some(([value]) => value === before);
  select.value = kept ? before : usual;
}

function seeModel({ adapters = [], context = 0 }) {
  longest = context;
  showContext();
  if (!at("model").options.length) loadModels().catch(unasked); // it was not there at first
  offer(at("adapter"), [["", "no adapter"], ...adapters.map((alias) => [alias, alias])], "");
  at("adapter-choice").hidden = !adapters.length;
}

at("model").addEventListener("change", () => look());

function askKey() {
  if (at("key-dialog").open) return;
  at("key").value = at("key-dialog").returnValue = "";
  at("key-dialog").showModal();
}

at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("key-dialog").addEventListener("close", () => {
  keyRefused = at("key-dialog").returnValue !== "use";
  if (keyRefused) return;
  key.set(at("key").value);
  start();
});

/** Asks again for the key on what nobody has clicked for, unless it was just declined. */
function unasked(error) {
  if (error.status === 401 && !keyRefused) askKey();
}

async function start() {
  try {
    await loadModels();
  } catch (error) {
    unasked(error); // the panel shows what is wrong
  }
  look();
}

for (const message of stored(sessionStorage, CHAT) ?? []) add(message);
restoreSettings();
showTheme(stored(localStorage, THEME));
showPanel(!narrow.matches);
grow();
const look = watcher({ model: () => at("model").value, seen: seeModel, failed: unasked });
start();
