// Markdown as elements. marked finds the parts; elements are made of them here, so that nothing
// that a model writes is ever read as markup of this page.

import { Lexer } from "./vendor/marked.js";
import { CodeBlock } from "./code.js";

const LONG = 2000; // characters of a list or table from which on what is over in it is made once
const MOST_OPEN = 4000; // of another block; a longer one is cut
const LEAST_PAUSE = 4; // times as long as the latest paint took, where that was long
const LONG_MS = 8;
const TOGETHER = 16; // blocks that are laid out, or left alone, as one
const DRAWN_MS = 250; // until the height of a block is known for sure
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const FENCE = /^( {0,3})(`{3,}(?=[^`\n]*\n)|~{3,})([^\n]*)\n/;
const ENDS = { list: (token) => token.items, table: (token) => token.rows };

// A text that grows. What is over is made once; a paint makes the last block anew, and of a long
// list or table the last item or row.
export class Markdown {
  #root;
  #open = ""; // the text of blocks that may still change
  #running = []; // their elements
  #begun = null; // a list or table whose first items are over: {type, element, head}
  #fence = null; // the code that is being written
  #part = null; // the last blocks
  #isNew = false;
  #pausesUntil = 0;

  constructor(root) {
    this.#root = root;
  }

  add(text) {
    this.#open += text.replaceAll("\r\n", "\n");
    this.#isNew ||= text !== "";
  }

  // Text that takes long to read, such as thousands of brackets, is read less often.
  paint() {
    const start = performance.now();
    if (!this.#isNew || start < this.#pausesUntil) return;
    this.#isNew = false;
    this.#paint();
    const took = performance.now() - start;
    if (took > LONG_MS) this.#pausesUntil = start + LEAST_PAUSE * took;
  }

  // Everything is over.
  end() {
    this.#paint();
    this.#fence?.end();
    this.#clear();
    for (const block of blocksOf(this.#open)) this.#finish(block);
    this.#open = "";
  }

  #paint() {
    for (;;) {
      if (this.#fence !== null) {
        const rest = this.#fence.add(this.#open);
        this.#open = rest ?? "";
        if (rest === null) return;
        this.#fence = null;
      }
      const blocks = blocksOf(this.#open);
      const last = blocks.findLastIndex(({ type }) => type !== "space");
      if (last < 0) return;
      this.#clear();
      for (const block of blocks.slice(0, last)) this.#finish(block);
      this.#open = textOf(blocks.slice(last));
      const fence = blocks[last].type === "code" ? FENCE.exec(this.#open) : null;
      if (fence === null) {
        this.#show(blocks[last]);
        return;
      }
      this.#fence = new Fence(fence);
      this.#put(this.#fence.element);
      this.#open = this.#open.slice(fence[0].length);
    }
  }

  #clear() {
    for (const element of this.#running) element.remove();
    this.#running = [];
  }

  // A block that is over.
  #finish(block) {
    if (this.#begun?.type === block.type) this.#begun.element.append(...partsOf(block, true));
    else this.#put(...partsOfLong(block).flatMap((one) => elementsOrText(one, true)));
    if (block.type !== "space") this.#begun = null;
  }

  // The last block, as far as it goes.
  #show(block) {
    const isList = block.type in ENDS;
    if (isList && this.#open.length > LONG && ENDS[block.type](block).length > 1) {
      this.#keep(block);
      return;
    }
    if (!isList && block.type !== "code" && this.#open.length > MOST_OPEN) {
      const [first, ...rest] = partsOfLong(block);
      this.#put(...elementsOrText(first, true));
      this.#open = textOf(rest) + this.#open.slice(block.raw.length);
      if (rest.length > 0) this.#paint();
      return;
    }
    const isMore = this.#begun?.type === block.type;
    if (!isMore) this.#begun = null;
    this.#running = isMore ? partsOf(block, false) : elementsOrText(block, false);
    if (isMore) this.#begun.element.append(...this.#running);
    else this.#put(...this.#running);
  }

  // After all others.
  #put(...elements) {
    for (const one of elements) {
      if (this.#part?.childNodes.length >= TOGETHER) this.#cut();
      this.#part ??= this.#root.appendChild(element("div", [], "blocks"));
      this.#part.append(one);
    }
  }

  // The part is full, and far from the end soon.
  #cut() {
    const full = this.#part;
    setTimeout(() => full.classList.add("past"), DRAWN_MS);
    this.#part = null;
  }

  // All items of a list or rows of a table but the last are over.
  #keep(block) {
    const { type } = block;
    const parts = partsOf(block, true);
    this.#running = parts.splice(-1);
    if (this.#begun?.type !== type) {
      const empty = type === "list" ? { ...block, items: [] } : { ...block, rows: [] };
      const [element] = elementsOf(empty, true);
      this.#put(element);
      this.#begun = { type, element: element.querySelector("tbody") ?? element };
    }
    this.#begun.element.append(...parts);
    if (type === "list") this.#goOn(block);
    this.#begun.element.append(...this.#running);
    const lines = block.raw.trimEnd().split("\n");
    const after = this.#open.slice(block.raw.trimEnd().length);
    this.#open =
      type === "table"
        ? [lines[0], lines[1], lines.at(-1)].join("\n") + after
        : this.#open.slice(textOf(block.items.slice(0, -1)).length);
  }

  // What follows of a list is one of its own, so that what is out of sight can be left alone.
  #goOn(block) {
    const before = this.#begun.element;
    const [after] = elementsOf({ ...block, items: [] }, true);
    if (block.ordered) after.start = before.start + before.childElementCount;
    before.classList.add("cut");
    after.classList.add("more");
    this.#cut();
    this.#put(after);
    this.#begun.element = after;
  }
}

const textOf = (tokens) => tokens.map(({ raw }) => raw).join("");

// Code between fences, read line by line.
class Fence {
  #block;
  #indent;
  #closes;
  #line = ""; // the last one, which may go on
  #written = 0; // characters of it
  #isFirst = true;

  constructor([, indent, marks, info]) {
    this.#block = new CodeBlock(languageOf({ lang: info.trim() }));
    this.#indent = new RegExp(`^\\s{${indent.length}}`);
    this.#closes = new RegExp(`^ {0,3}${marks}[~\`]* *$`);
  }

  get element() {
    return this.#block.element;
  }

  // What comes after the code, or null while it goes on.
  add(text) {
    const lines = (this.#line + text).split("\n");
    this.#line = lines.pop();
    let found = "";
    for (const [index, line] of lines.entries()) {
      if (this.#closes.test(line)) {
        this.#block.add(found);
        this.#block.end();
        return ["", ...lines.slice(index + 1), this.#line].join("\n");
      }
      found += this.#take(line);
      this.#written = 0;
      this.#isFirst = false;
    }
    // What may become the closing fence waits.
    if (!/^ *[`~]* *$/.test(this.#line)) found += this.#take(this.#line);
    this.#block.add(found);
    return null;
  }

  end() {
    if (!this.#closes.test(this.#line)) this.#block.add(this.#line === "" ? "" : this.#take(this.#line));
    this.#block.end();
  }

  // What is new of a line.
  #take(line) {
    const text = (this.#isFirst ? "" : "\n") + line.replace(this.#indent, "");
    const found = text.slice(this.#written);
    this.#written = text.length;
    return found;
  }
}

// What is nested too deeply to be read is a paragraph, as it is written, up to the next empty line.
function blocksOf(text) {
  try {
    return new Lexer({ gfm: true }).lex(text);
  } catch {
    const end = /\n\s*\n/.exec(text);
    const raw = end === null ? text : text.slice(0, end.index + end[0].length);
    return end === null ? [plainly(raw)] : [plainly(raw), ...blocksOf(text.slice(raw.length))];
  }
}

function elementsOrText(block, isOver) {
  try {
    return elementsOf(block, isOver);
  } catch {
    return [element("p", [block.raw])];
  }
}

// A block that is too long to be read anew in every frame, in parts: lines, words, or as it is written.
function partsOfLong(block) {
  if (block.raw.length <= MOST_OPEN || block.type in ENDS || block.type === "code") return [block];
  const found = Math.max(block.raw.lastIndexOf("\n", MOST_OPEN), block.raw.lastIndexOf(" ", MOST_OPEN));
  if (found < MOST_OPEN / 2) return [plainly(block.raw)];
  const [first, rest] = [block.raw.slice(0, found + 1), block.raw.slice(found + 1)];
  return [...blocksOf(first), ...blocksOf(rest).flatMap(partsOfLong)];
}

const plainly = (raw) => ({ type: "paragraph", raw, tokens: [{ type: "text", text: raw, raw }] });

const languageOf = (block) => /^[\w+#-]*/.exec(block.lang ?? "")[0];

// The elements of one block; `isOver` where its text will not change.
function elementsOf(token, isOver) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "code":
      return [codeBlock(token, isOver)];
    case "heading":
      return [element(`h${Math.min(6, token.depth + 2)}`, inline(token.tokens))];
    case "hr":
      return [element("hr")];
    case "blockquote":
      return [element("blockquote", token.tokens.flatMap((one) => elementsOf(one, isOver)))];
    case "list":
      return [list(token, isOver)];
    case "table":
      return [table(token)];
    case "paragraph":
      return [element("p", inline(token.tokens))];
    case "text":
      return token.tokens ? inline(token.tokens) : [plain(token.text)];
    default: // HTML, as it is written
      return [element("p", inline([token]))];
  }
}

function codeBlock(token, isOver) {
  const block = new CodeBlock(languageOf(token), isOver);
  block.add(token.text);
  block.end();
  return block.element;
}

function list(token, isOver) {
  const made = element(token.ordered ? "ol" : "ul", partsOf(token, isOver));
  if (token.ordered && Number.isInteger(token.start)) made.start = token.start;
  return made;
}

function table(token) {
  const made = element("table", [
    element("thead", [row(token.header, "th")]), element("tbody", partsOf(token, true)),
  ]);
  return element("div", [made], "wide");
}

// The items of a list, the rows of a table.
function partsOf(token, isOver) {
  return token.type === "table" ? token.rows.map((cells) => row(cells, "td")) : token.items.map((one) => item(one, isOver));
}

const row = (cells, tag) => element("tr", cells.map((cell) => element(tag, inline(cell.tokens))));

function item({ tokens, task, checked }, isOver) {
  const inside = tokens.filter(({ type }) => type !== "checkbox");
  const content = inside.flatMap((one) => elementsOf(one, isOver));
  return element("li", task ? [checked ? "☑ " : "☐ ", ...content] : content);
}

const WRAPS = { strong: "strong", em: "em", del: "del" };

function inline(tokens = []) {
  return tokens.flatMap((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return [element(WRAPS[token.type], inline(token.tokens))];
      case "codespan":
        return [element("code", [plain(token.text)])];
      case "br":
        return [element("br")];
      case "link":
        return [link(token.href, inline(token.tokens))];
      case "image": // is not loaded: its address may tell something to somebody
        return [link(token.href, [`image: ${token.text || token.href}`])];
      case "html":
        return [token.raw]; // as it is written
      default:
        return token.tokens ? inline(token.tokens) : [plain(token.text ?? token.raw)];
    }
  });
}

function link(href, content) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return element("span", content);
  const made = element("a", content);
  made.href = url.href;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

// Text with the few entities that Markdown has: '&lt;' → '<'.
function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (whole, number, hex, name) => {
    if (name !== undefined) return ENTITIES[name] ?? whole;
    const point = number === undefined ? Number.parseInt(hex, 16) : Number(number);
    return point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}

function element(tag, content = [], name = "") {
  const made = document.createElement(tag);
  if (name !== "") made.className = name;
  made.append(...content);
  return made;
}
