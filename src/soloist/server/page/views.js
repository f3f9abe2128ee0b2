// Where an answer's text goes: {add(piece), paint(), end()}, painted once a frame.

import { codeBlock, Markdown } from "./markdown.js";
import { highlight, isBareCode } from "./code.js";
import { TokenView } from "./tokens.js";

const NEAR_END = 60; // pixels: who reads further up is left there
const FIRST_LINE = /\S.*\n|\S.{39}/; // enough of an answer to tell code from prose

// Text as it comes, in an element that scrolls by itself where it has to.
export class PlainView {
  #parts;
  #new = { reasoning: "", text: "" };
  #scroller;

  constructor(root, scroller = root) {
    this.#scroller = scroller;
    const made = ["reasoning", "text"].map((name) => {
      const part = root.appendChild(document.createElement("span"));
      part.className = name === "text" ? "made-text" : name;
      return [name, part.appendChild(new Text())];
    });
    this.#parts = Object.fromEntries(made);
  }

  add({ text, reasoning, calls }) {
    this.#new.reasoning += reasoning;
    const called = calls.map((call) => (call.name ? `\n${call.name} ` : "") + call.arguments);
    this.#new.text += text + called.join("");
  }

  paint() {
    following(this.#scroller, () => {
      for (const [name, text] of Object.entries(this.#new))
        if (text !== "") this.#parts[name].appendData(text);
      this.#new = { reasoning: "", text: "" };
    });
  }

  end() {
    this.paint();
  }
}

// An answer of a chat: reasoning folded, Markdown or code, tool calls as they are written.
export class AnswerView {
  text = "";
  reasoning = "";
  calls = []; // {id, name, arguments}
  #root;
  #scroller;
  #showsTokens;
  #body = null;
  #pending = "";
  #fold = null;
  #new = { reasoning: "", calls: false };
  #cards = [];

  constructor(root, scroller, showsTokens = false) {
    this.#root = root;
    this.#scroller = scroller;
    this.#showsTokens = showsTokens;
  }

  add(piece) {
    this.text += piece.text;
    this.reasoning += piece.reasoning;
    this.#new.reasoning += piece.reasoning;
    for (const { index, id, name, arguments: given } of piece.calls) {
      const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
      call.id ||= id ?? "";
      call.name += name;
      call.arguments += given;
      this.#new.calls = true;
    }
    if (this.#showsTokens && (piece.tokens.length > 0 || this.#body !== null)) {
      this.#body ??= new TokenView(this.#part("div", "text"));
      this.#body.add(piece);
    } else this.#pending += piece.text;
  }

  paint() {
    following(this.#scroller, () => {
      if (this.#new.reasoning !== "") this.#reason();
      if (this.#pending !== "" && (this.#body !== null || FIRST_LINE.test(this.text))) this.#write();
      this.#body?.paint();
      if (this.#new.calls) this.#call();
    });
  }

  end() {
    this.paint();
    following(this.#scroller, () => {
      if (this.#pending !== "") this.#write(); // not even one line
      this.#body?.end();
    });
    if (this.#fold !== null) this.#fold.querySelector("summary").textContent = "Reasoning";
  }

  #write() {
    if (this.#body === null) {
      // The first line says what it is.
      const root = this.#part("div", "text");
      this.#body = isBareCode(this.text) ? new CodeText(root) : new Markdown(root);
    }
    this.#body.add(this.#pending);
    this.#pending = "";
  }

  #reason() {
    if (this.#fold === null) {
      this.#fold = this.#part("details", "reasoning");
      const summary = this.#fold.appendChild(document.createElement("summary"));
      summary.textContent = "Reasoning …";
      this.#fold.append(document.createElement("div"));
      this.#fold.lastChild.append(new Text());
    }
    this.#fold.lastChild.firstChild.appendData(this.#new.reasoning);
    this.#new.reasoning = "";
  }

  #call() {
    this.#new.calls = false;
    for (const [index, call] of this.calls.entries()) {
      if (call === undefined) continue;
      const card = (this.#cards[index] ??= this.#part("section", "call"));
      card.replaceChildren(...["h4", "pre"].map((tag) => document.createElement(tag)));
      card.firstChild.textContent = `calls ${call.name}`;
      card.lastChild.textContent = call.arguments;
    }
  }

  #part(tag, name) {
    const made = this.#root.appendChild(document.createElement(tag));
    made.className = name;
    return made;
  }
}

// Bare code grows in one block.
class CodeText {
  #code;

  constructor(root) {
    const block = codeBlock("", "python", false);
    this.#code = block.querySelector("code");
    this.#code.append(new Text());
    root.append(block);
  }

  add(text) {
    this.#code.firstChild.appendData(text);
  }

  paint() {}

  end() {
    highlight(this.#code, "python");
  }
}

// Whoever is at the end of a text stays there while it grows.
export function following(scroller, change) {
  const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
  change();
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}
