// The figures and the text of one stream, painted once a frame, however many chunks come.

import { shown, SOURCES } from "./meter.js";

export class Pane {
  #figures = {};

  constructor(root) {
    root.append(document.getElementById("pane").content.cloneNode(true));
    for (const element of root.querySelectorAll("[data-figure]"))
      this.#figures[element.dataset.figure] = element;
  }

  clear() {
    for (const [name, element] of Object.entries(this.#figures))
      element.textContent = ["source", "server", "ending", "problem"].includes(name) ? "" : "–";
  }

  fail(message) {
    this.clear();
    this.#figures.problem.textContent = message;
  }

  // Runs a stream to its end. `text` and `reasoning` are elements, `scroller` what scrolls them.
  async run(stream, { text, reasoning, scroller }) {
    this.clear();
    const arrived = { text: "", reasoning: "" };
    const targets = { text: text.appendChild(new Text()), reasoning: reasoning.appendChild(new Text()) };
    stream.add = (piece) => {
      arrived.text += piece.text;
      arrived.reasoning += piece.reasoning;
    };
    const paint = () => {
      const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
      for (const kind of ["text", "reasoning"]) {
        if (arrived[kind] !== "") targets[kind].appendData(arrived[kind]);
        arrived[kind] = "";
      }
      if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
    };
    const frame = () => {
      if (!stream.isRunning) return;
      paint();
      this.#show(stream.meter, performance.now());
      requestAnimationFrame(frame);
    };
    const running = stream.run();
    requestAnimationFrame(frame);
    await running;
    paint();
    this.#end(stream);
  }

  #show(meter, now) {
    const { usage, timings } = meter;
    const prompt = usage?.prompt_tokens;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n;
    this.#set("decode", shown.speed(meter.decode));
    if (now !== null) this.#set("recent", shown.speed(meter.recent(now)));
    this.#set("ttft", shown.ms(meter.ttft));
    this.#set("tokens", meter.chunks ? String(meter.tokens) : "–");
    this.#set("prompt", prompt === undefined ? "–" : `${prompt} (${cached ?? "?"})`);
  }

  #end(stream) {
    const { meter } = stream;
    this.#show(meter, null);
    this.#set("recent", "–");
    if (meter.chunks) this.#set("source", `Seen by this page; ${SOURCES[meter.source]}.`);
    this.#set("mbu", shown.share(meter.timings?.mbu));
    this.#set("server", timingsOf(meter.timings));
    this.#set("problem", stream.problem ?? "");
    const unit = meter.source === "chunks" ? "chunks" : "tokens";
    this.#set(
      "ending",
      `${stream.ending ?? `ended: ${meter.finish ?? "–"}`} · ${meter.tokens} ${unit}` +
        (meter.decode === null ? "" : ` at ${shown.speed(meter.decode)} ${unit}/s`),
    );
    if (stream.problem !== null && !meter.chunks) this.#set("ending", "");
  }

  #set(name, text) {
    const element = this.#figures[name];
    if (element.textContent !== text) element.textContent = text;
  }
}

// The server's own account, where it sends llama.cpp's object.
function timingsOf(timings) {
  if (!timings) return "";
  const parts = [
    `decode ${shown.speed(timings.predicted_per_second)} tokens/s`,
    timings.ttft_ms === undefined ? null : `TTFT ${shown.ms(timings.ttft_ms)} ms`,
    timings.queue_ms === undefined ? null : `queue ${shown.ms(timings.queue_ms)} ms`,
    `prompt ${shown.ms(timings.prompt_ms)} ms`,
    typeof timings.mbu === "number"
      ? `MBU ${shown.share(timings.mbu)} of ${timings.bandwidth_gb_per_s.toFixed(0)} GB/s`
      : null,
    timings.device,
    timings.executor,
  ];
  return `Said by the server: ${parts.filter(Boolean).join(" · ")}.`;
}
