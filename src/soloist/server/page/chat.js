// The chat: messages on the page, and what can be done with each.

import { body } from "./ask.js";
import { asked, asMarkdown, begun, Conversations, titled } from "./conversations.js";
import { EXAMPLES } from "./examples.js";
import { shown } from "./figures.js";
import { Stream } from "./stream.js";
import { AnswerView, following, toEnd } from "./views.js";

export class Chat {
  #page;
  #pane;
  #log = document.querySelector("#log");
  #form = document.querySelector("#chat form");
  #list = document.querySelector("#conversations");
  #kept;
  #current = begun();
  #edited = null; // the place of the message that is in the composer

  // page: {server, model, fields, showsTokens, send}: what is asked of whom, and who is told.
  constructor(page, pane, storage) {
    [this.#page, this.#pane] = [page, pane];
    this.#kept = new Conversations(storage);
    this.#show();
    document.querySelector("#clear").addEventListener("click", () => this.open(begun()));
    const input = this.#form.message;
    input.addEventListener("input", () => {
      input.style.height = "auto";
      input.style.height = `${Math.min(input.scrollHeight + 2, 240)}px`;
    });
    this.#log.addEventListener("click", (event) => copyCode(event.target));
  }

  // Sends what is in the composer; `started` is told of the stream.
  async send(started) {
    const content = this.#form.message.value;
    if (content.trim() === "") return;
    const fields = this.#page.fields("chat"); // may say that something else was mistyped
    const { messages } = this.#current;
    const before = messages.slice();
    if (this.#edited !== null) messages.length = this.#edited;
    messages.push({ role: "user", content });
    this.#compose("", null);
    if (await this.#answer(fields, started)) return;
    // Nothing was answered: the message may be sent again.
    messages.splice(0, messages.length, ...before);
    this.#form.message.value ||= content;
    this.#show();
  }

  // Another answer to the last message.
  async regenerate(started) {
    const fields = this.#page.fields("chat");
    const { messages } = this.#current;
    const before = messages.slice();
    while (messages.at(-1)?.role === "assistant") messages.pop();
    if (await this.#answer(fields, started)) return;
    messages.splice(0, messages.length, ...before);
    this.#show();
  }

  // The result of a tool, which the model goes on with.
  async result(call, content, started) {
    const fields = this.#page.fields("chat");
    const { messages } = this.#current;
    messages.push({ role: "tool", content, call_id: call.id });
    if (openCalls(messages).length > 0) {
      this.#save();
      this.#show();
      return;
    }
    if (!(await this.#answer(fields, started))) {
      messages.pop();
      this.#show();
    }
  }

  type(message) {
    this.#compose(message, null);
  }

  open(conversation) {
    if (this.#page.isBusy()) return;
    this.#current = conversation;
    this.#compose("", null);
    this.#pane.clear();
    this.#show();
    this.#form.message.focus();
  }

  // Whether there is an answer.
  async #answer(fields, started) {
    const { messages } = this.#current;
    this.#show({ isAnswering: true });
    const input = { messages: asked(messages, this.#form.system.value) };
    const stream = new Stream(this.#page.server(), "chat", body("chat", this.#page.model(), input, fields));
    started(stream);
    const article = this.#article({ role: "assistant" });
    const view = new AnswerView(article.querySelector(".said"), this.#log, this.#page.showsTokens());
    toEnd(this.#log);
    await this.#pane.run(stream, view);
    const { text, reasoning, calls } = view;
    if (stream.recording.arrivals.length === 0 && (stream.problem ?? stream.ending) !== null) return false;
    const { decode, tokens, ttft } = stream.recording;
    const note = `${shown.count(tokens)} tokens · ${shown.speed(decode)} tokens/s · TTFT ${shown.ms(ttft)} ms`;
    messages.push({ role: "assistant", content: text, reasoning, calls: calls.filter(Boolean), note });
    this.#save();
    following(this.#log, () => {
      this.#finish(article, messages.length - 1);
      this.#forResults();
    });
    return true;
  }

  #save() {
    const one = this.#current;
    one.title = titled(one.messages);
    one.changed = Date.now();
    const isKept = this.#kept.save(one);
    document.querySelector("#kept").textContent = isKept
      ? ""
      : "The browser's storage is full or forbidden: this conversation ends with the page.";
    this.#showList();
  }

  // Everything anew, from the messages.
  #show({ isAnswering = false } = {}) {
    const { messages } = this.#current;
    this.#log.replaceChildren();
    if (messages.length === 0 && !isAnswering) this.#log.append(this.#welcome());
    for (const [place, message] of messages.entries()) {
      const article = this.#article(message);
      const said = article.querySelector(".said");
      if (message.role === "assistant") {
        const view = new AnswerView(said, this.#log);
        const { content, reasoning = "", calls = [] } = message;
        view.add({ text: content, reasoning, calls: calls.map((call, index) => ({ ...call, index })), tokens: [] });
        view.end();
      } else said.append(element("div", "text", message.content));
      this.#finish(article, place);
    }
    if (!isAnswering) this.#forResults();
    if (messages.length > 0) toEnd(this.#log);
    this.#showList();
  }

  #article({ role, call_id: id }) {
    const article = element("article", role);
    const who = { user: "You", assistant: this.#page.model() ?? "Answer", tool: `Result ${id ?? ""}` };
    article.append(element("h3", "", who[role] ?? role), element("div", "said"));
    this.#log.append(article);
    return article;
  }

  // What can be done with a message.
  #finish(article, place) {
    const { messages } = this.#current;
    const { role, content, note } = messages[place];
    const bar = element("p", "actions");
    const add = (name, action) => {
      const made = element("button", "", name);
      made.type = "button";
      made.addEventListener("click", action);
      bar.append(made);
    };
    add("Copy", ({ target }) => copy(content, target));
    if (role === "user") add("Edit", () => !this.#page.isBusy() && this.#compose(content, place));
    if (role === "assistant" && place === messages.length - 1)
      add("Regenerate", () => this.#page.send("regenerate"));
    if (note) bar.append(element("span", "note", note));
    article.append(bar);
  }

  // A place for the results of calls that have none.
  #forResults() {
    for (const call of openCalls(this.#current.messages)) {
      const form = element("form", "result");
      const label = element("label", "", `Result of ${call.name}`);
      const input = label.appendChild(element("input", ""));
      input.autocomplete = "off";
      const send = element("button", "", "Give it");
      form.append(label, send);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        if (this.#page.isBusy()) return;
        this.#page.send("result", call, input.value);
      });
      this.#log.append(form);
    }
  }

  #compose(text, place) {
    this.#edited = place;
    const input = this.#form.message;
    input.value = text;
    input.dispatchEvent(new Event("input"));
    document.querySelector("#editing").hidden = place === null;
    if (place !== null) input.focus();
  }

  #welcome() {
    const made = element("div", "welcome");
    made.append(element("p", "", "Every token is shown when it arrives, timed by this page, counted by the engine. Try one:"));
    const cards = made.appendChild(element("div", "cards"));
    for (const { title, message } of EXAMPLES) {
      const card = cards.appendChild(element("button", "card"));
      card.type = "button";
      card.append(element("b", "", title), element("span", "", message));
      card.addEventListener("click", () => this.start(message));
    }
    return made;
  }

  start(message) {
    if (this.#page.isBusy()) return;
    this.type(message);
    this.#page.send("chat");
  }

  #showList() {
    const rows = this.#kept.all().map((one) => {
      const row = element("li");
      const open = element("button", "title", one.title || "(no words)");
      if (one.id === this.#current.id) open.setAttribute("aria-current", "true");
      open.addEventListener("click", () => this.open(one));
      const gone = element("button", "quiet", "×");
      gone.setAttribute("aria-label", `Delete ${one.title}`);
      gone.addEventListener("click", () => {
        if (this.#page.isBusy()) return;
        this.#kept.remove(one.id);
        if (one.id === this.#current.id) this.open(begun());
        this.#showList();
      });
      for (const button of [open, gone]) button.type = "button";
      row.append(open, gone);
      return row;
    });
    this.#list.replaceChildren(...rows);
    document.querySelector("#no-conversations").hidden = rows.length > 0;
  }

  // The conversation as a file.
  get exported() {
    return { json: JSON.stringify(this.#current, null, 2), md: asMarkdown(this.#current) };
  }
}

// Calls of the last answer that no result was given for.
function openCalls(messages) {
  const last = messages.findLastIndex(({ role }) => role === "assistant");
  const given = messages.slice(last + 1).map(({ call_id: id }) => id);
  if (messages.slice(last + 1).some(({ role }) => role !== "tool")) return [];
  return (messages[last]?.calls ?? []).filter(({ id }) => !given.includes(id));
}

async function copy(text, button) {
  if (!navigator.clipboard) return; // a page without HTTPS from another machine
  await navigator.clipboard.writeText(text);
  const name = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = name), 1200);
}

function copyCode(target) {
  if (target.matches(".copy")) copy(target.closest(".code-block").querySelector("code").textContent, target);
}

function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name !== "") made.className = name;
  made.textContent = text;
  return made;
}
