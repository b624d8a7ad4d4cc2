// Keeps the panel that shows what the server is doing: once a second, while anybody looks.

import { getJson } from "./api.js";
import { rounded } from "./messages.js";

const PERIOD = 1000; // milliseconds
const SAMPLES = 60;

const at = (id) => document.getElementById(id);

/** Returns what starts the watch, and starts it anew: another model, another key.
 *
 * `model` returns the id of the model that is meant; `seen` takes its numbers, `failed` an error.
 */
export function watcher({ model, seen, failed }) {
  const speeds = [];
  let last = null;
  let timer;
  let round = 0; // only the newest round goes on

  async function look() {
    clearTimeout(timer);
    round += 1;
    const mine = round;
    if (document.hidden) return;
    try {
      const stats = await getJson(`v1/system/stats?model=${encodeURIComponent(model())}`);
      if (mine !== round) return;
      measure(stats, performance.now());
      show(stats, speeds);
      seen(stats);
    } catch (error) {
      if (mine !== round) return;
      last = null;
      say(error.status ? error.message : "cannot be reached", "failed");
      failed(error);
    }
    timer = setTimeout(look, PERIOD);
  }

  function measure({ model, tokens_processed: tokens = 0 }, now) {
    if (last?.model === model && last.tokens <= tokens) {
      speeds.push((1000 * (tokens - last.tokens)) / (now - last.now));
      speeds.splice(0, speeds.length - SAMPLES);
    } else speeds.length = 0;
    last = { model, tokens, now };
  }

  document.addEventListener("visibilitychange", look);
  return look;
}

/** Fills one labelled bar: how much of `most` is taken, and `text` to say it. */
export function gauge(name, taken, most, text = `${taken} of ${most}`) {
  const share = most ? taken / most : 0;
  const bar = at(name);
  bar.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
  bar.classList.toggle("high", share > 0.9);
  bar.ariaValueMax = most || 1;
  bar.ariaValueNow = taken;
  bar.ariaValueText = at(`${name}-text`).textContent = text;
}

function show(stats, speeds) {
  if (!stats.loaded) {
    say("unloaded: the next message loads it", "waiting");
    return;
  }
  say(stats.running ? `${stats.running} running` : "ready", stats.running ? "busy" : "ready");
  gauge("running", stats.running, stats.capacity);
  const { blocks_used: used, blocks_total: total } = stats;
  gauge("cache", used, total, total ? `${rounded((100 * used) / total)}%` : "not paged");
  at("waiting").textContent = stats.waiting;
  at("preemptions").textContent = stats.preemptions;
  at("hits").textContent = stats.prefix_lookups
    ? `${Math.round((100 * stats.prefix_hits) / stats.prefix_lookups)}%`
    : "–";
  at("speed").textContent = speeds.at(-1) ? rounded(speeds.at(-1)) : "0";
  draw(speeds);
}

function say(text, state) {
  if (at("state").textContent !== text) at("state").textContent = text;
  at("state").dataset.state = state;
}

function draw(speeds) {
  const [area, line] = at("spark").children;
  const top = Math.max(...speeds, 1);
  const all = [...Array(SAMPLES - speeds.length).fill(0), ...speeds];
  const points = all.map((speed, index) => {
    const x = (120 * index) / (SAMPLES - 1);
    return `${x.toFixed(1)} ${(31 - 28 * (speed / top)).toFixed(1)}`;
  });
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${points.join("L")}V32H0Z`);
}
