// Code in colours: highlight.js finds the scopes, and elements are made of them here, never markup.

const FILES = {
  python: "python", py: "python", javascript: "javascript", js: "javascript", jsx: "javascript",
  typescript: "typescript", ts: "typescript", tsx: "typescript", bash: "bash", sh: "bash", shell: "bash",
  console: "bash", json: "json", c: "c", h: "c", cpp: "cpp", "c++": "cpp", cuda: "cpp", cu: "cpp",
  rust: "rust", rs: "rust", go: "go", java: "java", sql: "sql", xml: "xml", html: "xml", svg: "xml",
  yaml: "yaml", yml: "yaml", diff: "diff", patch: "diff",
};
const MOST_CHARACTERS = 50_000; // longer code stays plain: colouring it would hold up a frame

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
const known = new Map(); // file → whether it is loaded, or on its way

async function load(file) {
  core ??= import("./vendor/highlight.js").then(({ default: highlighter }) => {
    highlighter.configure({ __emitter: Elements });
    return highlighter;
  });
  const [highlighter, { default: grammar }] = await Promise.all([core, import(`./vendor/${file}.js`)]);
  highlighter.registerLanguage(file, grammar);
  return highlighter;
}

// Colours an element's text, as soon as its language is there; unknown languages stay plain.
export async function highlight(element, language) {
  const file = FILES[language.toLowerCase()];
  const text = element.textContent;
  if (file === undefined || text.length > MOST_CHARACTERS) return;
  if (!known.has(file)) known.set(file, load(file));
  const highlighter = await known.get(file);
  if (element.textContent !== text) return; // it went on meanwhile
  const { _emitter: made, errorRaised: error } = highlighter.highlight(text, { language: file });
  if (error === undefined) element.replaceChildren(made.root);
}

// Whether an answer is bare Python, as models write that were not trained to chat: Markdown would
// take its comments for headings. Its first line decides.
export function isBareCode(text) {
  const line = text.split("\n").find((one) => one.trim() !== "") ?? "";
  return /^( {4}|\t|(async )?def |class \w+[(:]|import \w|from [\w.]+ import |@\w+|>>> |#!\/)/.test(line);
}
