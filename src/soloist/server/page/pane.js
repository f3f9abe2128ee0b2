// The figures, the strip and the text of one request. Strip and text are painted once a frame, however
// many chunks come; the figures ten times a second.

import { shown, SOURCES, toldBy } from "./figures.js";
import { Columns, KINDS, Line, Strip, Surface } from "./strip.js";

const FIGURES_MS = 100; // digits that change more often cannot be read, and each change is a layout
const WORDS = ["source", "server", "ending", "problem"];
const NAMES = { read: "prompt read", cached: "prompt cached", made: "made", forced: "forced by the form", drafted: "drafted" };

export class Pane {
  peer = null; // another pane whose strip has the same scale
  #figures = {};
  #columns = new Columns();
  #line = new Line();
  #latest = null; // what is drawn
  #strip;
  #curve;
  #legend;
  #stage;
  #next = 0; // of the arrivals, the first that is not shown
  #told = -Infinity; // when the figures were set, in ms after sending

  constructor(root) {
    root.append(document.getElementById("pane").content.cloneNode(true));
    for (const element of root.querySelectorAll("[data-figure]"))
      this.#figures[element.dataset.figure] = element;
    const [strip, curve] = ["strip", "curve"].map((name) => root.querySelector(`.${name}`));
    [this.#strip, this.#curve] = [new Strip(strip), new Surface(curve)];
    this.#legend = root.querySelector(".legend");
    this.#stage = root.querySelector(".stage");
    new ResizeObserver(() => this.draw()).observe(strip);
  }

  clear() {
    this.#columns = new Columns();
    this.#line = new Line();
    this.#latest = null;
    this.#next = 0;
    this.#told = -Infinity;
    for (const [name, element] of Object.entries(this.#figures))
      element.textContent = WORDS.includes(name) ? "" : "–";
    this.#set("unit", "tokens/s");
    this.#legend.replaceChildren();
    this.#stage.classList.add("idle");
    this.draw();
  }

  fail(message) {
    this.clear();
    this.#set("problem", message);
  }

  say(text) {
    this.#set("ending", text);
  }

  // Sends a request and shows it to its end.
  async run(stream, view) {
    this.clear();
    const { recording } = stream;
    const frame = () => {
      if (!stream.isRunning) return;
      this.show(recording, performance.now() - stream.sent, view);
      requestAnimationFrame(frame);
    };
    const running = stream.run();
    requestAnimationFrame(frame);
    await running;
    this.show(recording, recording.last ?? 0, view, true);
    while (view.isBehind && !document.hidden) {
      await nextFrame();
      view.paint();
    }
    view.end();
    this.end(stream);
  }

  // The recording as it stood so many ms after sending; time only goes on.
  show(recording, ms, view, isOver = false) {
    const { arrivals } = recording;
    for (; this.#next < arrivals.length && arrivals[this.#next].ms <= ms; this.#next += 1) {
      const arrival = arrivals[this.#next];
      view.add(arrival.piece);
      this.#columns.add(arrival.ms, arrival);
    }
    const ttft = this.#next > 0 ? recording.ttft : null;
    const isFirst = ttft !== null && (this.#latest?.ttft ?? null) === null;
    const share = recording.prompt ? (recording.cached ?? 0) / recording.prompt : 0;
    if (this.#latest === null) this.#stage.classList.remove("idle");
    this.#latest = { ttft, share, ms, recording };
    if (isOver || isFirst || ms - this.#told >= FIGURES_MS) this.#tell(recording, ms, isOver);
    view.paint();
    this.#draw();
  }

  // The figures as they stood so many ms after sending, in digits and as a line.
  #tell(recording, ms, isOver) {
    this.#told = ms;
    const { ttft, tokens, decode, recent } = recording.at(ms);
    if (!isOver) this.#line.add(ms, recent);
    this.#line.draw(this.#curve);
    this.#set("recent", shown.speed(isOver ? decode : (recent ?? decode)));
    this.#set("decode", shown.speed(decode));
    this.#set("ttft", shown.ms(ttft));
    this.#set("tokens", ttft === null ? "–" : shown.count(tokens));
    const { prompt, cached } = recording;
    if (ttft !== null && prompt !== null) this.#set("prompt", `${shown.count(prompt)} (${shown.count(cached)})`);
    this.#name();
  }

  // In the size and the colours that the page has now.
  draw() {
    this.#strip.measure();
    this.#curve.measure();
    this.#draw();
    if (!this.#strip.isHidden) this.#line.draw(this.#curve);
  }

  #draw() {
    if (this.#strip.isHidden) return; // its tab
    const tallest = Math.max(this.#columns.tallest, this.peer?.#columns.tallest ?? 0);
    this.#strip.draw(this.#columns, this.#latest ?? { ttft: null, share: 0, ms: 0 }, tallest);
  }

  // The colours that are there, with their counts.
  #name() {
    if (this.#latest === null) return;
    const { recording, ttft } = this.#latest;
    const counts = Object.fromEntries(KINDS.map((kind) => [kind, sum(this.#columns.counts[kind])]));
    const cached = ttft === null ? 0 : (recording.cached ?? 0);
    const all = { read: ttft === null ? 0 : (recording.prompt ?? 0) - cached, cached, ...counts };
    const wanted = Object.entries(all).filter(([, count]) => count > 0);
    while (this.#legend.children.length > wanted.length) this.#legend.lastChild.remove();
    for (const [index, [kind, count]] of wanted.entries()) {
      const item = this.#legend.children[index] ?? this.#legend.appendChild(document.createElement("li"));
      if (item.className !== kind) item.className = kind;
      const text = `${NAMES[kind]} ${shown.count(count)}`;
      if (item.textContent !== text) item.textContent = text;
    }
  }

  // The figures of the whole: the speed is now the mean.
  end({ recording, ending, problem }) {
    const { decode, source } = recording;
    const hasText = recording.arrivals.length > 0;
    const unit = source === "chunks" ? "chunks" : "tokens";
    this.#set("recent", shown.speed(decode));
    this.#set("unit", `${unit}/s, mean`);
    this.#set("decode", shown.speed(decode));
    if (hasText) {
      this.#set("tokens", shown.count(recording.tokens));
      this.#set("source", `Seen by this page; ${SOURCES[source]}.`);
    }
    this.#set("mbu", shown.share(recording.timings?.mbu));
    this.#set("server", toldBy(recording.timings));
    this.#set("problem", problem ?? "");
    const speed = decode === null ? "" : ` at ${shown.speed(decode)} ${unit}/s`;
    const how = ending ?? `ended: ${recording.finish ?? "–"}`;
    this.#set("ending", problem && !hasText ? "" : `${how} · ${shown.count(recording.tokens)} ${unit}${speed}`);
  }

  #set(name, text) {
    const element = this.#figures[name];
    if (element.textContent !== text) element.textContent = text;
  }
}

// A tab that is hidden has none: then after a while.
const nextFrame = () =>
  new Promise((done) => {
    requestAnimationFrame(done);
    setTimeout(done, 200);
  });

const sum = (counts) => counts.reduce((total, count) => total + count, 0);
