// Server-sent events from bytes, cut anywhere.

export class EventReader {
  #decoder = new TextDecoder();
  #line = "";
  #endedByReturn = false;
  #name = "message";
  #data = [];

  // The events that these bytes complete: [{name, data}].
  push(bytes) {
    return this.#read(this.#decoder.decode(bytes, { stream: true }));
  }

  // Whether bytes of an event are left over that never got its end.
  get isInside() {
    return this.#line !== "" || this.#data.length > 0;
  }

  #read(text) {
    const events = [];
    // A line ends with \r\n, \n or \r; the two halves of \r\n may come apart.
    if (this.#endedByReturn && text.startsWith("\n")) text = text.slice(1);
    if (text !== "") this.#endedByReturn = text.endsWith("\r");
    const lines = (this.#line + text).split(/\r\n|\n|\r/);
    this.#line = lines.pop();
    for (const line of lines) {
      if (line === "") this.#finish(events);
      else this.#take(line);
    }
    return events;
  }

  #take(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment, sent to keep a connection open
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#name = value;
  }

  #finish(events) {
    if (this.#data.length > 0) events.push({ name: this.#name, data: this.#data.join("\n") });
    this.#name = "message";
    this.#data = [];
  }
}
