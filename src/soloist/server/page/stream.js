// One streamed request: sent, read, stopped.

import { curl, PATHS, piece } from "./ask.js";
import { Recording } from "./recording.js";
import { EventReader } from "./sse.js";

const PATIENCE_MS = 3000; // for a server to say that a request has ended

export function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

export class Stream {
  recording = new Recording();
  events = []; // [ms since sending, data], as they came
  problem = null; // what the server said went wrong
  ending = null; // how a stop went
  isUnreachable = false; // whether nothing that this page may read came back
  isRunning = true;
  #id = null;
  #stopped = null;
  #aborter = new AbortController();

  // server: {base, key, cancels}; `cancels` where a DELETE ends a request.
  constructor(server, kind, body) {
    this.server = server;
    this.url = server.base + PATHS[kind];
    this.body = body;
    this.curl = curl(this.url, body, Boolean(server.key));
  }

  // Runs to the end; everything that goes wrong becomes `problem`.
  async run() {
    this.sent = performance.now();
    try {
      const reply = await fetch(this.url, {
        method: "POST",
        headers: headers(this.server.key),
        body: JSON.stringify(this.body),
        signal: this.#aborter.signal,
      });
      if (reply.ok) await this.#read(reply.body);
      else this.problem = `${reply.status}: ${messageOf(await reply.text())}`;
    } catch (error) {
      this.#fail(error);
    }
    this.isRunning = false;
    return this;
  }

  async #read(stream) {
    const reader = stream.getReader();
    const events = new EventReader();
    for (;;) {
      const { done, value } = await reader.read();
      const now = performance.now();
      if (done) break;
      for (const { data } of events.push(value)) {
        this.events.push([now - this.sent, data]);
        if (data === "[DONE]") return;
        this.#take(JSON.parse(data), now);
        if (this.problem !== null || this.ending !== null) return;
      }
    }
    this.problem = "the stream ended without [DONE]";
  }

  #take(chunk, now) {
    if (chunk.error) {
      this.recording.see(chunk, null, now - this.sent); // what was made until then
      this.#told(chunk.error, now);
      return;
    }
    this.#id ??= chunk.id;
    this.recording.see(chunk, piece(chunk), now - this.sent);
  }

  #told(error, now) {
    if (this.#stopped !== null && error.code === "cancelled")
      // The server says so once its device has let go of the request.
      this.ending = `stopped: the server's device ended it within ${(now - this.#stopped).toFixed(1)} ms`;
    else this.problem = error.message ?? JSON.stringify(error);
  }

  #fail(error) {
    if (this.#stopped !== null && error.name === "AbortError")
      this.ending = "stopped: the connection was closed; when the device stopped is not known";
    else if (error instanceof TypeError) {
      this.isUnreachable = this.recording.arrivals.length === 0;
      this.problem = this.isUnreachable
        ? `${this.url} does not answer, or does not let this page in (CORS).`
        : `the connection to ${this.url} broke`;
    }
    else this.problem = `${error.name}: ${error.message}`;
  }

  // Ask the server to end the request, since its answer tells when it has; otherwise hang up.
  async stop() {
    if (!this.isRunning || this.#stopped !== null) return;
    this.#stopped = performance.now();
    if (!this.server.cancels || this.#id === null) {
      this.#aborter.abort();
      return;
    }
    setTimeout(() => this.#aborter.abort(), PATIENCE_MS);
    try {
      const reply = await fetch(`${this.url}/${this.#id}`, {
        method: "DELETE",
        headers: headers(this.server.key),
      });
      // A 404 means that it has just ended by itself.
      if (!reply.ok && reply.status !== 404) this.#aborter.abort();
    } catch {
      this.#aborter.abort();
    }
  }
}

// What an error's body says, as it is.
export function messageOf(text) {
  try {
    const { error } = JSON.parse(text);
    return error?.message ?? text;
  } catch {
    return text;
  }
}
