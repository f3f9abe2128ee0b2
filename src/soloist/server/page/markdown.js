// Markdown as elements. marked finds the parts; elements are made of them here, so that nothing
// that a model writes is ever read as markup of this page.

import { Lexer } from "./vendor/marked.js";
import { highlight } from "./code.js";

const MOST_OPEN = 20_000; // characters of one block but code; what is longer is shown as it is
const LEAST_PAUSE = 10; // times as long as the latest paint took, where that was long
const LONG_MS = 4;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

// A text that grows. Blocks that are over are made once; the last one anew with every paint.
export class Markdown {
  #root;
  #open = ""; // the text of blocks that may still change
  #running = []; // their elements
  #isNew = false;
  #pausesUntil = 0;

  constructor(root) {
    this.#root = root;
  }

  add(text) {
    this.#open += text;
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

  #paint() {
    const blocks = blocksOf(this.#open);
    const last = blocks.findLastIndex(({ type }) => type !== "space");
    if (last < 0) return;
    const [over, open] = [blocks.slice(0, last), blocks.slice(last)];
    if (over.length === 0 && this.#append(open[0])) return;
    for (const element of this.#running) element.remove();
    this.#root.append(...over.flatMap((block) => elementsOrText(block, true)));
    this.#open = open.map(({ raw }) => raw).join("");
    this.#running = elementsOrText(open[0], false);
    this.#root.append(...this.#running);
    if (open[0].type !== "code" && this.#open.length > MOST_OPEN) this.#close();
  }

  // Everything is over.
  end() {
    this.#paint();
    this.#close();
  }

  #close() {
    for (const element of this.#running) element.remove();
    if (this.#open.length > MOST_OPEN && !/^(```|~~~| {4})/.test(this.#open))
      this.#root.append(element("p", [this.#open]));
    else this.#root.append(...blocksOf(this.#open).flatMap((one) => elementsOrText(one, true)));
    this.#open = "";
    this.#running = [];
  }

  // Long code grows in place.
  #append(block) {
    const code = this.#running[0]?.querySelector?.(":scope > pre > code");
    if (block.type !== "code" || !code || code.dataset.language !== languageOf(block)) return false;
    const before = code.textContent;
    if (!block.text.startsWith(before)) return false;
    code.append(block.text.slice(before.length));
    code.normalize();
    return true;
  }
}

// What is nested too deeply to be read is a paragraph, as it is written, up to the next empty line.
function blocksOf(text) {
  try {
    return new Lexer({ gfm: true }).lex(text);
  } catch {
    const end = /\n\s*\n/.exec(text);
    const raw = end === null ? text : text.slice(0, end.index + end[0].length);
    const deep = { type: "paragraph", raw, tokens: [{ type: "text", text: raw, raw }] };
    return end === null ? [deep] : [deep, ...blocksOf(text.slice(raw.length))];
  }
}

function elementsOrText(block, isOver) {
  try {
    return elementsOf(block, isOver);
  } catch {
    return [element("p", [block.raw])];
  }
}

const languageOf = (block) => /^[\w+#-]*/.exec(block.lang ?? "")[0];

// The elements of one block; `isOver` where its text will not change.
function elementsOf(token, isOver) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "code":
      return [codeBlock(token.text, languageOf(token), isOver)];
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

function list(token, isOver) {
  const made = element(token.ordered ? "ol" : "ul");
  if (token.ordered && Number.isInteger(token.start)) made.start = token.start;
  for (const item of token.items) {
    const inside = item.tokens.filter(({ type }) => type !== "checkbox");
    const content = inside.flatMap((one) => elementsOf(one, isOver));
    made.append(element("li", item.task ? [item.checked ? "☑ " : "☐ ", ...content] : content));
  }
  return made;
}

function table(token) {
  const row = (cells, tag) => element("tr", cells.map((cell) => element(tag, inline(cell.tokens))));
  const made = element("table", [
    element("thead", [row(token.header, "th")]),
    element("tbody", token.rows.map((cells) => row(cells, "td"))),
  ]);
  return element("div", [made], "wide");
}

// Code with its language and a button that copies it.
export function codeBlock(text, language, isOver) {
  const code = element("code", [text]);
  code.dataset.language = language;
  const pre = element("pre", [code]);
  pre.tabIndex = 0;
  const copy = element("button", ["Copy"], "copy");
  copy.type = "button";
  const made = element("div", [element("p", [language, copy], "code-head"), pre], "code-block");
  if (isOver && language !== "") highlight(code, language);
  return made;
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
