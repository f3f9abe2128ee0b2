// Where an answer's text goes: {add(piece), paint(), isBehind, end()}, painted once a frame.

import { CodeBlock, isBareCode } from "./code.js";
import { putOff } from "./later.js";
import { Markdown } from "./markdown.js";
import { Pieces } from "./pieces.js";
import { TokenView } from "./tokens.js";

const MOST_A_FRAME = 700; // characters: what came while a frame was late is shown over several
const UNREADABLE = 200; // characters a frame from which on nobody sees colours: they wait
const NEAR_END = 60; // pixels: who reads further up is left there
// Enough of an answer to tell code from prose: a line that is neither a comment nor a first heading.
const FIRST_LINE = /^(?:\s*#(?![#!]).*\n)*\s*(?!#(?![#!]))\S(?:.*\n|.{39})/;
const LONG_ENOUGH = 400; // characters, whatever they are

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
      return [name, new Pieces(part, { isInline: true })];
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
      for (const [name, text] of Object.entries(this.#new)) {
        this.#parts[name].add(text.slice(0, MOST_A_FRAME));
        this.#new[name] = text.slice(MOST_A_FRAME);
      }
    });
  }

  get isBehind() {
    return this.#new.reasoning !== "" || this.#new.text !== "";
  }

  end() {
    while (this.isBehind) this.paint();
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
  #reasons = null;
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
      if (this.#pending !== "" && (this.#body !== null || isTelling(this.text))) this.#write();
      this.#body?.paint();
      if (this.#new.calls) this.#call();
    });
  }

  get isBehind() {
    return this.#new.reasoning !== "" || (this.#pending !== "" && this.#body !== null);
  }

  end() {
    following(this.#scroller, () => {
      while (this.#new.reasoning !== "") this.#reason();
      while (this.#pending !== "") this.#write(); // perhaps not even one line
      if (this.#new.calls) this.#call();
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
    if (this.#pending.length > UNREADABLE) putOff();
    this.#body.add(this.#pending.slice(0, MOST_A_FRAME));
    this.#pending = this.#pending.slice(MOST_A_FRAME);
  }

  #reason() {
    if (this.#fold === null) {
      this.#fold = this.#part("details", "reasoning");
      const summary = this.#fold.appendChild(document.createElement("summary"));
      summary.textContent = "Reasoning …";
      this.#reasons = new Pieces(this.#fold.appendChild(document.createElement("div")));
    }
    this.#reasons.add(this.#new.reasoning.slice(0, MOST_A_FRAME));
    this.#new.reasoning = this.#new.reasoning.slice(MOST_A_FRAME);
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

const isTelling = (text) => text.length > LONG_ENOUGH || FIRST_LINE.test(text);

// Bare code is one block.
class CodeText {
  #block = new CodeBlock("python");

  constructor(root) {
    root.append(this.#block.element);
  }

  add(text) {
    this.#block.add(text);
  }

  paint() {}

  end() {
    this.#block.end();
  }
}

// Whoever is at the end of a text stays there while it grows.
export function following(scroller, change) {
  const follower = followerOf(scroller);
  change();
  follower.follow();
}

// Whoever was elsewhere is at the end now.
export function toEnd(scroller) {
  followerOf(scroller).toEnd();
}

const followers = new WeakMap();

function followerOf(scroller) {
  if (!followers.has(scroller)) followers.set(scroller, new Follower(scroller));
  return followers.get(scroller);
}

// To ask where the end is makes a browser lay out the text at once. So it is asked when somebody
// scrolls, and when the frame has been laid out anyway.
class Follower {
  #scroller;
  #isAtEnd;
  #top = 0; // where it was put
  #laidOut = new ResizeObserver(() => this.#put());

  constructor(scroller) {
    this.#scroller = scroller;
    this.#look();
    scroller.addEventListener("scroll", () => {
      // Text that is not laid out yet does not count, so that where it was put is the end.
      if (!this.#isAtEnd || scroller.scrollTop < this.#top) this.#look();
    });
  }

  follow() {
    if (!this.#isAtEnd) return;
    this.#laidOut.unobserve(this.#scroller);
    this.#laidOut.observe(this.#scroller); // which tells after the next layout
  }

  toEnd() {
    this.#isAtEnd = true;
    this.#put();
  }

  #look() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    this.#isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  #put() {
    if (!this.#isAtEnd) return;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#top = this.#scroller.scrollTop;
  }
}
