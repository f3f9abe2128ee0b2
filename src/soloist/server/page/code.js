// Code in colours: highlight.js finds the scopes, and elements are made of them here, never markup.

import { later } from "./later.js";
import { Pieces } from "./pieces.js";

const FILES = {
  python: "python", py: "python", javascript: "javascript", js: "javascript", jsx: "javascript",
  typescript: "typescript", ts: "typescript", tsx: "typescript", bash: "bash", sh: "bash", shell: "bash",
  console: "bash", json: "json", c: "c", h: "c", cpp: "cpp", "c++": "cpp", cuda: "cpp", cu: "cpp",
  rust: "rust", rs: "rust", go: "go", java: "java", sql: "sql", xml: "xml", html: "xml", svg: "xml",
  yaml: "yaml", yml: "yaml", diff: "diff", patch: "diff",
};
const MOST_CHARACTERS = 20_000; // a longer piece is one long line: colouring it would hold up a frame
const MOST_READ_AGAIN = 3000;

// What highlight.js writes its scopes to.
class Elements {
  #open = [document.createDocumentFragment()];

  addText(text) {
    this.#open.at(-1).append(text);
  }

  startScope(scope) {
    const span = document.createElement("span");
    span.className = `code-${scope.split(/[.:]/)[0]}`;
    this.#open.at(-1).append(span);
    this.#open.push(span);
  }

  endScope() {
    if (this.#open.length > 1) this.#open.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(other) {
    this.#open.at(-1).append(other.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }

  get root() {
    return this.#open[0];
  }
}

let core = null; // loaded with the first code
const known = new Map(); // file → its highlighter, which is loaded or on its way

async function load(file) {
  core ??= import("./vendor/highlight.js").then(({ default: highlighter }) => {
    highlighter.configure({ __emitter: Elements });
    return highlighter;
  });
  const [highlighter, { default: grammar }] = await Promise.all([core, import(`./vendor/${file}.js`)]);
  highlighter.registerLanguage(file, grammar);
  return highlighter;
}

// Its highlighter, or null where the server does not answer: it is asked again for the next code.
function loaded(file) {
  const failed = () => {
    known.delete(file);
    core = null;
    return null;
  };
  if (!known.has(file)) known.set(file, load(file).catch(failed));
  return known.get(file);
}

// What makes languages ready before they are needed: each takes up to 50 ms at its first use.
export const preparations = [...new Set(Object.values(FILES))].map((file) => async () => {
  const highlighter = await loaded(file);
  highlighter?.highlight("a", { language: file });
});

// Colours the pieces of a code one after the other; unknown languages stay plain.
export class Colours {
  #file;
  #before = ""; // what the next piece is read with

  constructor(language) {
    this.#file = FILES[language.toLowerCase()];
    if (this.#file !== undefined) loaded(this.#file);
  }

  // Colours an element's text, as soon as its language is there.
  async add(element) {
    if (this.#file === undefined) return;
    const highlighter = await loaded(this.#file);
    if (highlighter !== null) later(() => this.#colour(element, highlighter));
  }

  #colour(element, highlighter) {
    const text = element.textContent;
    if (text.length > MOST_CHARACTERS) return;
    const before = this.#before;
    const { _emitter: made, _top: top, errorRaised: error } = highlighter.highlight(before + text, {
      language: this.#file, ignoreIllegals: true,
    });
    // A piece may end inside something, such as a long comment: the next one is read with it.
    const isInside = top?.parent !== undefined && before.length + text.length <= MOST_READ_AGAIN;
    this.#before = isInside ? before + text : "";
    if (error === undefined) element.replaceChildren(without(made.root, before.length));
  }
}

// Elements without the first so many characters.
function without(root, characters) {
  if (characters === 0) return root;
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  let left = characters;
  while (texts.nextNode() && left > texts.currentNode.length) left -= texts.currentNode.length;
  const range = document.createRange();
  range.setStart(texts.currentNode, left);
  range.setEnd(root, root.childNodes.length);
  return range.extractContents();
}

// A block of code that grows, with its language and a button that copies it.
export class CodeBlock {
  element;
  #code = document.createElement("code");
  #pieces;

  constructor(language, isColoured = true) {
    const colours = isColoured ? new Colours(language) : null;
    this.#pieces = new Pieces(this.#code, { told: (piece) => colours?.add(piece) });
    const made = (tag, name, ...content) => {
      const one = document.createElement(tag);
      if (name !== "") one.className = name;
      one.append(...content);
      return one;
    };
    const copy = made("button", "copy", "Copy");
    copy.type = "button";
    const pre = made("pre", "", this.#code);
    pre.tabIndex = 0;
    this.element = made("div", "code-block", made("p", "code-head", language, copy), pre);
  }

  add(text) {
    this.#pieces.add(text);
  }

  end() {
    this.#pieces.end();
  }
}

// Whether an answer is bare Python, as models write that were not trained to chat: Markdown would
// take its comments for headings. Its first line that is no comment decides.
export function isBareCode(text) {
  const line = text.split("\n").find((one) => one.trim() !== "" && !/^\s*#(?![#!])/.test(one)) ?? "";
  return /^( {4}|\t|(async )?def |class \w+[(:]|import \w|from [\w.]+ import |@\w+|>>> |#!\/)/.test(line);
}
