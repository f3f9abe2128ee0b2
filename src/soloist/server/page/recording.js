// What came of one request, and when: counts of the engine, times of the page. Pure.

export const RECENT_MS = 500;

export class Recording {
  arrivals = []; // chunks with text: {ms, total, made, forced, drafted, piece}, ms after sending
  usage = null; // the last one that came
  timings = null; // the server's own, where it sends them
  finish = null;
  #isCounted = true;
  #forced = 0; // told by the arrivals so far
  #drafted = 0;

  // One chunk that came so many ms after sending; `piece` where it carries text, else null.
  see(chunk, piece, ms) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.timings) this.timings = chunk.timings;
    this.finish = chunk.choices?.[0]?.finish_reason ?? this.finish;
    if (piece === null) return;
    const tokens = chunk.usage?.completion_tokens;
    this.#isCounted &&= tokens !== undefined;
    const before = this.arrivals.at(-1)?.total ?? 0;
    const total = this.#isCounted ? tokens : before + 1;
    const [forced, drafted] = [this.forced - this.#forced, this.drafted - this.#drafted];
    this.#forced = this.forced;
    this.#drafted = this.drafted;
    const made = Math.max(0, total - before - forced - drafted);
    this.arrivals.push({ ms, total, made, forced, drafted, piece });
  }

  // A recording of arrivals that were stored: [{ms, total, text}].
  static of(arrivals, { source, tokens, finish = null }) {
    const made = new Recording();
    let before = 0;
    for (const { ms, total, text } of arrivals) {
      const piece = { text, reasoning: "", calls: [], tokens: [] };
      made.arrivals.push({ ms, total, made: total - before, forced: 0, drafted: 0, piece });
      before = total;
    }
    made.#isCounted = source === "usage";
    if (source !== "chunks") made.usage = { completion_tokens: tokens };
    made.finish = finish;
    return made;
  }

  // What the counts come from: "usage" of every chunk, the "total" at the end (the first chunk is
  // then taken for one token), or "chunks", which are not tokens.
  get source() {
    if (this.#isCounted && this.arrivals.length > 0) return "usage";
    return this.usage?.completion_tokens === undefined ? "chunks" : "total";
  }

  get forced() {
    return this.usage?.completion_tokens_details?.forced_tokens ?? this.timings?.forced_n ?? 0;
  }

  // Drafted tokens that the model accepted: of Soloist, or as OpenAI or llama.cpp counts them.
  get drafted() {
    const details = this.usage?.completion_tokens_details;
    const drafted = details?.drafted_tokens ?? details?.accepted_prediction_tokens;
    return drafted ?? this.timings?.draft_n_accepted ?? 0;
  }

  get prompt() {
    return this.usage?.prompt_tokens ?? null;
  }

  get cached() {
    return this.usage?.prompt_tokens_details?.cached_tokens ?? this.timings?.cache_n ?? null;
  }

  // Time to the first chunk with text, or null.
  get ttft() {
    return this.arrivals[0]?.ms ?? null;
  }

  // Time of the last chunk with text, or null.
  get last() {
    return this.arrivals.at(-1)?.ms ?? null;
  }

  get tokens() {
    return this.usage?.completion_tokens ?? this.arrivals.length;
  }

  // (tokens_last - tokens_first) / (t_last - t_first) in 1/s, or null where that is not defined.
  get decode() {
    return this.arrivals.length === 0 ? null : this.#speed(0, this.arrivals.length - 1);
  }

  // The figures as they stood at a time: {ttft, tokens, decode, recent}.
  at(ms) {
    const index = this.#latest(ms);
    if (index < 0) return { ttft: null, tokens: 0, decode: null, recent: null };
    const since = Math.max(0, this.#latest(ms - RECENT_MS));
    const begun = Math.max(this.arrivals[since].ms, ms - RECENT_MS);
    const made = this.#total(index) - this.#total(since);
    return {
      ttft: this.ttft,
      tokens: Math.round(this.#total(index)),
      decode: this.#speed(0, index),
      recent: ms > begun ? (1e3 * made) / (ms - begun) : null,
    };
  }

  // When the nth token came, or null.
  msOf(tokens) {
    const index = this.arrivals.findIndex((_, i) => this.#total(i) >= tokens - 1e-9);
    return index < 0 ? null : this.arrivals[index].ms;
  }

  // Tokens with the last of these arrivals.
  #total(index) {
    const { total } = this.arrivals[index];
    const chunks = this.arrivals.length;
    if (this.source !== "total") return total;
    return chunks === 1 ? this.tokens : 1 + ((total - 1) * (this.tokens - 1)) / (chunks - 1);
  }

  #speed(first, last) {
    const ms = this.arrivals[last].ms - this.arrivals[first].ms;
    return ms > 0 ? (1e3 * (this.#total(last) - this.#total(first))) / ms : null;
  }

  // The last arrival until then, or -1.
  #latest(ms) {
    let [low, high] = [0, this.arrivals.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.arrivals[middle].ms <= ms) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }
}
