// Renders a small part of Markdown as DOM nodes: what a model writes never becomes markup.

const DEPTH = 8; // quotes and lists inside each other; deeper ones are shown as plain text

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const TABLE_RULE = /^[\s|:-]+$/;
const MARK = /\\[!-/:-@[-`{-~]|`+|\*\*|__|~~|\*|_|!?\[|https?:\/\/[^\s<>"'`*]+/g;
const WEB = /^(?:https?:\/\/|mailto:)[^\s]+$/i;
const EMPHASIS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/** Shows one growing text in `element`; `set` redraws only the blocks that have changed. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  set(text) {
    const blocks = split(text.replaceAll("\r\n", "\n").split("\n"), 0);
    const sources = blocks.map((block) => block.kind.name + block.lines.join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(block.kind.draw(block.lines, 0));
    this.sources = sources;
  }
}

/** Makes an element with attributes and children; strings become text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Blocks. Each kind says where a block that starts at a line ends, or 0 if none of it starts there.

const KINDS = [
  {
    name: "code",
    end(lines, at) {
      const open = FENCE.exec(lines[at]);
      if (!open) return 0;
      for (let end = at + 1; end < lines.length; end += 1) {
        if (closesCode(lines[end], open[1])) return end + 1;
      }
      return lines.length;
    },
    draw(lines) {
      const [, fence, language] = FENCE.exec(lines[0]);
      const closed = lines.length > 1 && closesCode(lines.at(-1), fence);
      const code = lines.slice(1, closed ? -1 : undefined).join("\n");
      const attributes = { type: "button", class: "text copy", "data-copy": "code" };
      const copy = make("button", attributes, "Copy");
      return make("figure", { class: "code" },
        make("figcaption", {}, make("span", {}, language || "text"), copy),
        make("pre", { tabindex: "0" }, make("code", {}, code)));
    },
  },
  {
    name: "heading",
    end: (lines, at) => (HEADING.test(lines[at]) ? at + 1 : 0),
    draw([line]) {
      const [mark, hashes] = HEADING.exec(line);
      const level = Math.min(hashes.length + 2, 6); // the page has its own h1 and h2
      return make(`h${level}`, {}, ...inline(line.slice(mark.length)));
    },
  },
  {
    name: "rule",
    end: (lines, at) => (RULE.test(lines[at]) ? at + 1 : 0),
    draw: () => make("hr"),
  },
  {
    name: "quote",
    end: (lines, at) => runEnd(lines, at, (line) => QUOTE.test(line)),
    draw: (lines, depth) =>
      make("blockquote", {}, ...draw(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  },
  {
    name: "table",
    end(lines, at) {
      const rule = lines[at + 1];
      if (!lines[at].includes("|") || !rule?.includes("|") || !rule.includes("-")) return 0;
      if (!TABLE_RULE.test(rule)) return 0;
      return runEnd(lines, at + 2, (line) => line.includes("|")) || at + 2;
    },
    draw([head, rule, ...rows]) {
      const sides = cells(rule).map((cell) => (cell.endsWith(":") ? "right" : "left"));
      const row = (line, tag) => make("tr", {}, ...cells(line).map((cell, column) =>
        make(tag, { class: sides[column] ?? "left" }, ...inline(cell))));
      return make("div", { class: "table", tabindex: "0" }, make("table", {},
        make("thead", {}, row(head, "th")),
        make("tbody", {}, ...rows.map((line) => row(line, "td")))));
    },
  },
  {
    name: "list",
    end(lines, at) {
      const first = ITEM.exec(lines[at]);
      if (!first) return 0;
      const ordered = isOrdered(first);
      let end = at + 1;
      for (let next = end; next < lines.length; next += 1) {
        const item = ITEM.exec(lines[next]);
        const inside = indent(lines[next]) >= first[1].length + 2;
        if (item && !inside && isOrdered(item) !== ordered) break;
        if (item || inside) end = next + 1;
        else if (lines[next].trim()) break;
      }
      return end;
    },
    draw(lines, depth) {
      const first = ITEM.exec(lines[0]);
      const list = make(isOrdered(first) ? "ol" : "ul");
      if (isOrdered(first)) list.start = parseInt(first[2], 10);
      for (const item of items(lines, first[1].length)) {
        const blocks = split(item, depth + 1);
        const nodes = blocks.map(({ kind, lines: own }) =>
          kind.name === "paragraph" && blocks[0].lines === own
            ? make("span", {}, ...inline(own.join("\n")))
            : kind.draw(own, depth + 1));
        list.append(make("li", {}, ...nodes));
      }
      return list;
    },
  },
];

const PARAGRAPH = {
  name: "paragraph",
  draw: (lines) => make("p", {}, ...inline(lines.join("\n"))),
};

function split(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const plain = (line) => depth >= DEPTH || !starting(lines, line)[1];
    let [kind, end] = plain(at) ? [PARAGRAPH, at + 1] : starting(lines, at);
    if (kind === PARAGRAPH) {
      while (end < lines.length && lines[end].trim() && plain(end)) end += 1;
    }
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function starting(lines, at) {
  for (const kind of KINDS) {
    const end = kind.end(lines, at);
    if (end) return [kind, end];
  }
  return [PARAGRAPH, 0];
}

function draw(lines, depth) {
  return split(lines, depth).map((block) => block.kind.draw(block.lines, depth));
}

function runEnd(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return end > at ? end : 0;
}

function closesCode(line, fence) {
  const mark = line.trim();
  return mark.startsWith(fence) && !mark.replaceAll(fence[0], "");
}

const indent = (line) => line.length - line.trimStart().length;
const isOrdered = (item) => item[2].length > 1;

/** Parts the lines of a list into those of its items, without their marks and indents. */
function items(lines, outer) {
  const found = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < outer + 2) {
      width = item[0].length;
      found.push([line.slice(width)]);
    } else {
      found.at(-1).push(line.slice(Math.min(width, indent(line))));
    }
  }
  return found;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split("|").map((cell) => cell.trim());
}

// Inside a line

function inline(text, depth = 0) {
  const nodes = [];
  let plain = 0;
  let mark;
  const marks = new RegExp(MARK); // its own position: this function calls itself
  while ((mark = marks.exec(text))) {
    const found = span(text, mark[0], mark.index, depth);
    if (!found) continue;
    nodes.push(...broken(text.slice(plain, mark.index)), found.node);
    plain = marks.lastIndex = found.end;
  }
  nodes.push(...broken(text.slice(plain)));
  return nodes;
}

/** Reads what a mark begins; nothing if it is only a character. */
function span(text, mark, at, depth) {
  const start = at + mark.length;
  if (mark[0] === "\\") return { node: mark[1], end: start };
  if (mark[0] === "`") {
    const end = text.indexOf(mark, start);
    if (end < 0) return null;
    return { node: make("code", {}, text.slice(start, end)), end: end + mark.length };
  }
  if (mark.startsWith("http")) {
    const address = mark.replace(/[.,;:!?)\]]+$/, "");
    return { node: link(address, [address]), end: at + address.length };
  }
  if (depth >= DEPTH) return null;
  if (mark.endsWith("[")) {
    const middle = text.indexOf("](", start);
    const end = middle < 0 ? -1 : text.indexOf(")", middle);
    const address = end < 0 ? "" : text.slice(middle + 2, end);
    if (!WEB.test(address)) return null;
    return { node: link(address, inline(text.slice(start, middle), depth + 1)), end: end + 1 };
  }
  const end = closing(text, mark, at);
  if (end < 0) return null;
  const node = make(EMPHASIS[mark], {}, ...inline(text.slice(start, end), depth + 1));
  return { node, end: end + mark.length };
}

function closing(text, mark, at) {
  const start = at + mark.length;
  const within = (index) => /\w/.test(text[index] ?? "");
  if (/\s/.test(text[start] ?? " ") || (mark[0] === "_" && within(at - 1))) return -1;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const next = text[end + mark.length];
    if (mark.length === 1 && next === mark) end += 1; // a double one closes something else
    else if (next === mark[0] && mark !== "~~") continue; // the last two of three
    else if (mark[0] === "_" && within(end + mark.length)) continue; // inside a name
    else if (!/\s/.test(text[end - 1])) return end;
  }
  return -1;
}

function link(address, children) {
  const attributes = { href: address, target: "_blank", rel: "noopener noreferrer" };
  return make("a", attributes, ...children);
}

function broken(text) {
  const nodes = text.split("\n").flatMap((line, index) => (index ? [make("br"), line] : [line]));
  return nodes.filter(Boolean);
}
