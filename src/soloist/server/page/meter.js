// Speed of one stream, by the same rules for every server. Times are in ms, by the page's clock.

const RECENT_MS = 500;

export class Meter {
  chunks = 0; // with text
  usage = null; // the last one that came
  timings = null; // the server's own, where it sends them
  finish = null;
  #sent;
  #first = null;
  #last = null;
  #counted = true;
  #marks = [];

  constructor(sent) {
    this.#sent = sent;
  }

  // One chunk that came at `now`; `hasText` where it carries text, reasoning or a tool call.
  see(chunk, hasText, now) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timings) this.timings = chunk.timings;
    this.finish = chunk.choices?.[0]?.finish_reason ?? this.finish;
    if (!hasText) return;
    this.chunks += 1;
    const tokens = chunk.usage?.completion_tokens ?? null;
    this.#counted &&= tokens !== null;
    this.#last = { now, tokens, chunks: this.chunks };
    this.#first ??= this.#last;
  }

  // Time to the first chunk with text, or null.
  get ttft() {
    return this.#first && this.#first.now - this.#sent;
  }

  // What the counts come from: "usage" of every chunk, the "total" at the end (the first chunk is
  // then taken for one token), or "chunks", which are not tokens.
  get source() {
    if (this.#counted && this.#first) return "usage";
    return this.usage?.completion_tokens === undefined ? "chunks" : "total";
  }

  get tokens() {
    return this.usage?.completion_tokens ?? this.chunks;
  }

  // (tokens_last - tokens_first) / (t_last - t_first) in 1/s, or null where that is not defined.
  get decode() {
    if (!this.#first || this.#last.now <= this.#first.now) return null;
    return (1e3 * this.#made()) / (this.#last.now - this.#first.now);
  }

  #made() {
    switch (this.source) {
      case "usage":
        return this.#last.tokens - this.#first.tokens;
      case "total":
        return this.usage.completion_tokens - 1;
      default:
        return this.#last.chunks - this.#first.chunks;
    }
  }

  // Speed of about the last half second, looked at once a frame; or null.
  recent(now) {
    if (!this.#last) return null;
    this.#marks.push({ now, tokens: this.tokens });
    while (this.#marks.length > 2 && now - this.#marks[1].now > RECENT_MS) this.#marks.shift();
    const { now: then, tokens } = this.#marks[0];
    return now > then ? (1e3 * (this.tokens - tokens)) / (now - then) : null;
  }
}

export const SOURCES = {
  usage: "tokens from the usage of every chunk",
  total: "tokens from the usage at the end; the first chunk is taken for one token",
  chunks: "counted in chunks, which may hold several tokens or none: the server sends no usage",
};

export const shown = {
  speed: (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 100 ? 1 : 0)),
  ms: (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 100 ? 1 : 0)),
  share: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`),
};
