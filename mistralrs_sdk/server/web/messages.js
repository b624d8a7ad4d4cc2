// Shows the messages of a conversation: what was said, what was thought, and how fast.

import { MarkdownView, make } from "./markdown.js";

/** One message on the page. `message` is {role, content} and, of an answer, what came with it. */
export class MessageView {
  constructor(message) {
    this.message = message;
    this.body = make("div", { class: "body" });
    this.element = make("li", { class: `message ${message.role}` },
      make("h3", { class: "hidden" }, message.role === "user" ? "You" : "Model"));
    if (message.role === "user") this.#ofUser();
    else this.#ofModel();
    this.update();
  }

  /** Draws what has changed in the message; `running` is whether more will come. */
  update(running = false) {
    const { content, reasoning, error, facts } = this.message;
    if (this.message.role === "user") {
      this.body.textContent = content;
      return;
    }
    this.element.setAttribute("aria-busy", String(running));
    this.thinking.hidden = !reasoning;
    if (reasoning) {
      this.thought.set(reasoning);
      const unfinished = running && !content;
      this.thinking.firstChild.textContent = unfinished ? "Thinking…" : "Thoughts";
      this.thinking.classList.toggle("busy", unfinished);
    }
    this.view.set(content);
    this.dots.hidden = !running || Boolean(content || reasoning);
    this.facts.textContent = facts ?? "";
    this.failure.hidden = !error;
    if (this.failure.textContent !== (error ?? "")) this.failure.textContent = error ?? "";
    this.tools.hidden = running;
    this.copy.hidden = !content;
  }

  #ofUser() {
    const edit = action("edit", "Edit");
    this.element.append(this.body, make("div", { class: "tools" }, edit));
  }

  #ofModel() {
    const thought = make("div", { class: "body" });
    this.thinking = make("details", { class: "thinking" }, make("summary"), thought);
    this.thought = new MarkdownView(thought);
    this.view = new MarkdownView(this.body);
    const dots = [make("i"), make("i"), make("i")];
    this.dots = make("p", { class: "dots", "aria-hidden": "true" }, ...dots);
    this.failure = make("p", { class: "failure", role: "alert" });
    this.facts = make("span", { class: "speed-note" });
    this.copy = action("copy", "Copy");
    this.tools = make("span", { class: "tools" }, this.copy, action("retry", "Try again"));
    this.element.append(this.thinking, this.body, this.dots, this.failure,
      make("div", { class: "foot" }, this.facts, this.tools));
  }
}

/** Says how an answer went: tokens, their speed, the wait for the first, and why it ended. */
export function factsOf({ usage, tokens, first, seconds, reason }) {
  const count = usage?.completion_tokens ?? tokens;
  const measured = seconds > 0 && count > 1 ? (count - 1) / seconds : 0;
  const speed = usage?.avg_compl_tok_per_sec || measured;
  const about = usage ? "" : "≈ ";
  return [
    count ? `${about}${count} token${count === 1 ? "" : "s"}` : "",
    speed ? `${about}${rounded(speed)} tokens/s` : "",
    first ? `first after ${first < 10 ? first.toFixed(2) : first.toFixed(0)} s` : "",
    ENDS[reason] ?? "",
  ].filter(Boolean).join(" · ");
}

/** Shows three digits of a number that is not small, and one decimal of one that is. */
export const rounded = (value) => (value < 99.95 ? value.toFixed(1) : Math.round(value).toString());

const ENDS = {
  length: "cut at the most tokens allowed",
  tool_calls: "ended with a tool call",
  canceled: "stopped",
};

function action(name, text) {
  return make("button", { type: "button", class: "text", "data-action": name }, text);
}
