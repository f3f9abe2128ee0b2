// The race: the same request to two servers. Where they share a machine each is recorded alone, and
// both recordings are played back together at true speed.

import { base, body } from "./ask.js";
import { picture } from "./picture.js";
import { advice, areNeighbours, RIVALS } from "./rivals.js";
import { packed, unpacked } from "./share.js";
import { headers, Stream } from "./stream.js";
import { compared, typical, verdict } from "./verdict.js";
import { PlainView } from "./views.js";

const NAME_MS = 5000; // for another server to say what it serves
const find = (selector) => document.querySelector(selector);

export class Race {
  #page;
  #panes;
  #form = find("#race form");
  #outputs = [...document.querySelectorAll("#race .output")];
  #names = [...document.querySelectorAll("#race h2")];
  #result = null;
  #isStopped = false;

  // page: {server, model, fields}; panes: ours and the other's.
  constructor(page, panes) {
    [this.#page, this.#panes] = [page, panes];
    [panes[0].peer, panes[1].peer] = [panes[1], panes[0]];
    const { rival, base: address, shared } = this.#form;
    rival.append(...Object.entries(RIVALS).map(([key, { name }]) => new Option(name, key)));
    const guess = () => (shared.checked = areNeighbours(address.value, location.href));
    rival.addEventListener("change", () => {
      if (rival.value in RIVALS) address.value = RIVALS[rival.value].base;
      find("#lets-in").textContent = advice(rival.value, location.origin);
      guess();
    });
    address.addEventListener("change", guess);
    find("#replay").addEventListener("click", () => this.#page.play(() => this.#replay()));
    find("#share-link").addEventListener("click", (event) => this.#link(event.target));
    find("#share-picture").addEventListener("click", () => this.#save());
  }

  stop() {
    this.#isStopped = true;
  }

  async run(started) {
    const { kind, prompt, shared, runs, counts, rival } = this.#form;
    const other = { base: base(this.#form.base.value), key: this.#form.key.value.trim(), cancels: false };
    const fields = this.#page.fields(kind.value, { isTimed: true });
    const input =
      kind.value === "chat" ? { messages: [{ role: "user", content: prompt.value }] } : { prompt: prompt.value };
    this.#begin();
    this.#say("Asking the other server for its model …");
    const theirs = this.#form.model.value.trim() || (await firstModel(other));
    const sides = [
      { server: this.#page.server(), model: this.#page.model(), isCounted: true },
      { server: other, model: theirs, isCounted: counts.checked },
    ];
    const names = [this.#page.model() ?? "this server", `${RIVALS[rival.value]?.name ?? "the other"}${theirs ? ` · ${theirs}` : ""}`];
    this.#title(names);
    const make = ({ server, model, isCounted }) =>
      new Stream(server, kind.value, body(kind.value, model, input, fields, isCounted));
    const recordings = [[], []];
    for (let run = 1; run <= Number(runs.value) && !this.#isStopped; run += 1) {
      const streams = sides.map(make);
      started(streams);
      const told = `run ${run} of ${runs.value}`;
      if (shared.checked) await this.#record(streams, told);
      else await this.#watch(streams, told);
      const failed = streams.findIndex(({ problem, recording }) => problem !== null || recording.arrivals.length === 0);
      if (failed >= 0 || this.#isStopped) {
        this.#fail(streams, failed, rival.value);
        return;
      }
      for (const [i, { recording }] of streams.entries()) recordings[i].push(recording);
    }
    if (this.#isStopped) {
      this.#say("Stopped.");
      return;
    }
    const { tokens, times } = compared(...recordings);
    const best = times.map((list, i) => recordings[i][typical(list)]);
    this.#result = {
      prompt: prompt.value, isShared: shared.checked, tokens, times,
      sides: best.map((recording, i) => ({ name: names[i], recording })),
    };
    await this.#replay();
  }

  // A result of a link.
  async open(text) {
    this.#begin();
    this.#result = await unpacked(text);
    this.#form.prompt.value = this.#result.prompt;
    this.#title(this.#result.sides.map(({ name }) => name));
    await this.#replay();
    this.#say("This result came with the link: this page did not measure it.");
  }

  // One after the other, each with the machine for itself.
  async #record(streams, told) {
    for (const [i, stream] of streams.entries()) {
      this.#say(`They share a machine, so each is recorded alone: ${["this server", "the other"][i]}, ${told} …`);
      if (!this.#isStopped) await stream.run();
      if (stream.problem !== null) return;
    }
  }

  // Both at once, watched.
  async #watch(streams, told) {
    this.#say(`Both at the same time: ${told} …`);
    const views = this.#views();
    await Promise.all(streams.map((stream, i) => this.#panes[i].run(stream, views[i])));
  }

  // Both recordings together, at the speed at which they were made.
  async #replay() {
    this.#isStopped = false;
    const { sides, isShared } = this.#result;
    const told = isShared
      ? "Replayed together at true speed; recorded one after the other, since they share a machine."
      : "Replayed at true speed; they ran at the same time.";
    this.#say(told);
    const views = this.#views();
    for (const pane of this.#panes) pane.clear();
    const last = Math.max(...sides.map(({ recording }) => recording.last));
    const start = performance.now();
    await new Promise((done) => {
      const frame = () => {
        const ms = this.#isStopped ? last : Math.min(last, performance.now() - start);
        for (const [i, { recording }] of sides.entries())
          this.#panes[i].show(recording, ms, views[i], ms >= recording.last);
        if (ms >= last) done();
        else requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    });
    for (const [i, { recording }] of sides.entries()) {
      views[i].end();
      this.#panes[i].end({ recording, ending: null, problem: null });
    }
    const { headline, details } = verdict(this.#result);
    find("#verdict").textContent = headline;
    find("#verdict-details").textContent = details;
    find("#after").hidden = false;
  }

  #begin() {
    this.#isStopped = false;
    this.#result = null;
    for (const id of ["#verdict", "#verdict-details"]) find(id).textContent = "";
    find("#after").hidden = true;
    for (const pane of this.#panes) pane.clear();
    for (const output of this.#outputs) output.replaceChildren();
  }

  #views() {
    for (const output of this.#outputs) output.replaceChildren();
    return this.#outputs.map((output) => new PlainView(output));
  }

  #fail(streams, failed, rival) {
    this.#say(this.#isStopped ? "Stopped." : "");
    if (failed < 0 || this.#isStopped) return;
    const { problem, isUnreachable } = streams[failed];
    const more = failed === 1 && isUnreachable ? ` ${advice(rival, location.origin)}` : "";
    this.#panes[failed].fail((problem ?? "no text came") + more);
  }

  #say(text) {
    find("#race-status").textContent = text;
  }

  #title(names) {
    for (const [i, name] of names.entries()) this.#names[i].textContent = name;
  }

  async #link(button) {
    const url = new URL(`#race=${await packed(this.#result)}`, document.baseURI).href;
    history.replaceState(null, "", url);
    this.#say("The address of this page now holds the result.");
    if (!navigator.clipboard) return;
    await navigator.clipboard.writeText(url);
    button.textContent = "Link copied";
    setTimeout(() => (button.textContent = "Copy a link"), 1500);
  }

  async #save() {
    const anchor = document.createElement("a");
    anchor.href = URL.createObjectURL(await picture(this.#result));
    anchor.download = "soloist-race.png";
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
  }
}

// Its first model, or null where it does not say.
async function firstModel({ base: url, key }) {
  try {
    const signal = AbortSignal.timeout(NAME_MS);
    const reply = await fetch(`${url}/models`, { headers: headers(key), signal });
    return (await reply.json()).data[0].id;
  } catch {
    return null;
  }
}
