// What the playground computes, without a browser: node --test tests/server/page_test.mjs

import assert from "node:assert/strict";
import { test } from "node:test";

const at = "../../src/soloist/server/page";
const { firstPiece } = await import(`${at}/pieces.js`);
const { EventReader } = await import(`${at}/sse.js`);
const { Recording } = await import(`${at}/recording.js`);
const { Columns, KINDS } = await import(`${at}/strip.js`);
const { compared, median, typical, verdict } = await import(`${at}/verdict.js`);
const { advice, areNeighbours, RIVALS } = await import(`${at}/rivals.js`);
const { packed, unpacked } = await import(`${at}/share.js`);
const { formFields } = await import(`${at}/forms.js`);
const { asked, asMarkdown, Conversations } = await import(`${at}/conversations.js`);
const { Colours, isBareCode } = await import(`${at}/code.js`);
const { base, body, curl, piece, sampling } = await import(`${at}/ask.js`);

const STREAM = new TextEncoder().encode(
  ': a comment\r\n\r\ndata: {"a":"é🦀"}\r\n\r\nevent: x\ndata: one\ndata:two\n\n' +
    "id: 3\rdata: [DONE]\r\rdata: never ended",
);
const EVENTS = [
  { name: "message", data: '{"a":"é🦀"}' },
  { name: "x", data: "one\ntwo" },
  { name: "message", data: "[DONE]" },
];

test("events are the same wherever the bytes are cut", () => {
  for (let first = 0; first <= STREAM.length; first += 1)
    for (let second = first; second <= STREAM.length; second += 1) {
      const reader = new EventReader();
      const cuts = [STREAM.slice(0, first), STREAM.slice(first, second), STREAM.slice(second)];
      assert.deepEqual(cuts.flatMap((cut) => reader.push(cut)), EVENTS, `${first}, ${second}`);
    }
});

test("events are the same byte by byte", () => {
  const reader = new EventReader();
  const found = [...STREAM].flatMap((byte) => reader.push(Uint8Array.of(byte)));
  assert.deepEqual(found, EVENTS);
});

const chunk = (completion_tokens, details = {}) => ({
  choices: [{ delta: { content: "x" } }],
  ...(completion_tokens !== undefined && { usage: { completion_tokens, ...details } }),
});
const see = (recording, given, ms) => recording.see(given, piece(given), ms);

function recorded(...points) {
  const made = new Recording();
  for (const [ms, tokens] of points) see(made, chunk(tokens), ms);
  return made;
}

test("decode speed is tokens between the first and the last chunk over their time", () => {
  const made = new Recording();
  see(made, { choices: [{ delta: { role: "assistant", content: "" } }] }, 10);
  assert.equal(made.ttft, null); // a role is no token
  see(made, chunk(4), 20);
  assert.equal(made.ttft, 20);
  assert.equal(made.decode, null); // no time has passed
  see(made, chunk(8), 30);
  see(made, chunk(24), 40);
  see(made, { choices: [], usage: { completion_tokens: 25 } }, 90);
  assert.equal(made.source, "usage");
  assert.equal(made.decode, 1000); // (24 - 4) / 20 ms, whatever comes without text
  assert.equal(made.tokens, 25);
  assert.equal(made.at(35).tokens, 8);
  assert.equal(made.at(35).decode, 400);
  assert.equal(made.at(19).ttft, null);
});

test("without usage in every chunk the total counts, without any the chunks do", () => {
  const made = recorded([10], [20], [30]);
  assert.equal(made.source, "chunks");
  assert.equal(made.decode, 100);
  see(made, { choices: [], usage: { completion_tokens: 9 } }, 35);
  assert.equal(made.source, "total");
  assert.equal(made.decode, 400);
  assert.equal(made.msOf(5), 20);
});

test("forced and drafted tokens are counted apart, the rest was made", () => {
  const made = new Recording();
  see(made, chunk(1), 10);
  const details = { forced_tokens: 6, accepted_prediction_tokens: 2 };
  see(made, chunk(10, { completion_tokens_details: details }), 20);
  see(made, chunk(12, { completion_tokens_details: details }), 30);
  const kinds = made.arrivals.map((one) => KINDS.map((kind) => one[kind]));
  assert.deepEqual(kinds, [[1, 0, 0], [1, 6, 2], [2, 0, 0]]);
});

test("recent speed forgets what is long ago", () => {
  const points = Array.from({ length: 20 }, (_, i) => [100 * i, i <= 10 ? 1 : 1 + 100 * (i - 10)]);
  const made = recorded(...points);
  assert.equal(made.at(50).recent, 0);
  assert.equal(made.at(1900).recent, 1000);
  assert.equal(made.at(1400).recent, 800);
});

test("columns get wider, and lose no token", () => {
  const columns = new Columns();
  for (let ms = 0; ms < 5000; ms += 7) columns.add(ms, { made: 2, forced: 1, drafted: 0 });
  const [made, forced] = KINDS.map((kind) => columns.counts[kind].reduce((a, b) => a + b));
  assert.deepEqual([made, forced], [2 * 715, 715]);
  const wide = new Columns();
  wide.reach(4998);
  for (let ms = 0; ms < 5000; ms += 7) wide.add(ms, { made: 2, forced: 1, drafted: 0 });
  assert.deepEqual(columns, wide); // however it grew
});

test("a race compares the time of as many tokens, in one sentence", () => {
  const ours = [recorded([10, 1], [20, 11], [30, 21]), recorded([10, 1], [40, 21]), recorded([9, 1], [29, 21])];
  const theirs = [recorded([50, 1], [171, 20]), recorded([50, 1], [400, 30]), recorded([60, 1], [180, 20])];
  const found = compared(ours, theirs);
  assert.deepEqual(found, { tokens: 20, times: [[30, 40, 29], [171, 400, 180]] });
  assert.equal(median(found.times[0]), 30);
  assert.deepEqual(found.times.map(typical), [0, 2]);
  assert.equal(verdict(found).headline, "The other took 6.0 times as long.");
  assert.match(verdict(found).details, /^20 tokens: 30.0 ms here, 180 ms there; the median of 3 runs/);
  const [here, there] = found.times;
  assert.equal(verdict({ tokens: 20, times: [there, here] }).headline, "This server took 6.0 times as long.");
  assert.match(verdict({ tokens: 20, times: [[100], [101]] }).headline, /^Both took equally long/);
  assert.equal(compared(ours, [recorded([5], [6])]).tokens, null);
});

test("a link gives a race back, and nothing else", async () => {
  const points = Array.from({ length: 2000 }, (_, i) => [5 + i, 1 + i]);
  const sides = ["a", "b"].map((name) => ({ name, recording: recorded(...points) }));
  const result = { prompt: "é", isShared: true, tokens: 2000, times: [[1], [2]], sides };
  const text = await packed(result);
  assert.match(text, /^[\w-]+$/);
  const back = await unpacked(text);
  assert.equal(back.prompt, "é");
  const [{ recording: given }, { recording: found }] = [sides[0], back.sides[0]];
  assert.deepEqual([found.ttft, found.last, found.tokens], [given.ttft, given.last, given.tokens]);
  assert.ok(Math.abs(found.decode / given.decode - 1) < 0.01);
  await assert.rejects(unpacked("AAAA"), /holds no result of a race/);
  const hostile = { ...result, times: [["<b>"], [1]] };
  await assert.rejects(unpacked(await packed(hostile)), /a field is missing/);
  const bomb = { ...result, prompt: "x".repeat(1e6) };
  await assert.rejects(unpacked(await packed(bomb)), /more than 200000 bytes/);
});

test("who cannot be reached is told the flag of that server", () => {
  const origin = "http://127.0.0.1:8000";
  for (const rival of Object.keys(RIVALS)) assert.match(advice(rival, origin), /cors|origins/i);
  assert.match(advice("", origin), /OLLAMA_ORIGINS=.*--cors-origins.*--allowed-origins.*lms server start --cors/);
  assert.ok(areNeighbours("http://localhost:1/v1", "http://127.0.0.1:8000/"));
  assert.ok(!areNeighbours("http://10.0.0.2:1/v1", "http://127.0.0.1:8000/"));
});

test("a schema and tools become fields, and what is no JSON is told", () => {
  const fields = formFields({ schema: '{"type": "object"}', tools_text: '{"name": "f"}', choice: "required" }, "chat");
  assert.deepEqual(fields, {
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: { type: "object" } } },
    tools: [{ type: "function", function: { name: "f" } }],
    tool_choice: "required",
  });
  assert.deepEqual(formFields({ tools_text: '{"name": "f"}' }, "completion"), {});
  assert.throws(() => formFields({ schema: "{" }, "chat"), /the schema: no JSON/);
  assert.throws(() => formFields({ tools_text: "[{}]" }, "chat"), /a tool has no name/);
});

test("conversations are kept, sent and written down", () => {
  const entries = new Map([["theme", "dark"], ["soloist.conversation.bad", "{"]]);
  const storage = {
    get length() { return entries.size; },
    key: (i) => [...entries.keys()][i],
    getItem: (key) => entries.get(key) ?? null,
    setItem: (key, value) => entries.set(key, value),
    removeItem: (key) => entries.delete(key),
  };
  const kept = new Conversations(storage);
  const calls = [{ id: "1", name: "f", arguments: "{}" }];
  const messages = [
    { role: "user", content: "Hi" },
    { role: "assistant", content: "", reasoning: "r", calls, note: "9 tokens" },
    { role: "tool", content: "7", call_id: "1" },
  ];
  for (const [id, changed] of [["a", 1], ["b", 2]]) assert.ok(kept.save({ id, title: "Hi", changed, messages }));
  assert.deepEqual(kept.all().map(({ id }) => id), ["b", "a"]);
  kept.remove("b");
  assert.deepEqual(kept.all().map(({ id }) => id), ["a"]);
  assert.equal(new Conversations(null).all().length, 0);
  assert.ok(!new Conversations(null).save(kept.get("a")));
  const [system, , answer, tool] = asked(messages, "Be brief");
  assert.deepEqual(system, { role: "system", content: "Be brief" });
  assert.deepEqual(Object.keys(answer), ["role", "content", "tool_calls"]); // no reasoning, no notes
  assert.deepEqual(tool, { role: "tool", content: "7", tool_call_id: "1" });
  assert.match(asMarkdown(kept.get("a")), /# Hi[^]*> r[^]*`f\(\{\}\)`[^]*## tool/);
});

test("a text is cut at the same places however it comes", () => {
  const pieces = (text) => {
    const found = [];
    for (let length = firstPiece(text); length > 0; length = firstPiece(text)) {
      found.push(text.slice(0, length));
      text = text.slice(length);
    }
    return { found, rest: text };
  };
  const samples = [
    "def f(x):\n    return x\n\n\n".repeat(200), "    all of it is indented\n".repeat(200), "{}".repeat(5000),
    `${"x".repeat(5000)}\nafter a long line\n`.repeat(3), "words and words\n\n".repeat(300),
  ];
  for (const text of samples) {
    const { found, rest } = pieces(text);
    assert.equal(found.join("") + rest, text);
    assert.ok(found.every((piece) => piece.endsWith("\n")));
    for (const step of [1, 7, 1000]) {
      let open = "";
      const grown = [];
      for (let at = 0; at < text.length; at += step) {
        const { found: some, rest: left } = pieces(open + text.slice(at, at + step));
        grown.push(...some);
        open = left;
      }
      assert.deepEqual(grown, found);
      assert.equal(open, rest);
    }
  }
  assert.ok(pieces(samples[0]).found.every((piece) => piece.length < 700));
  assert.ok(pieces(samples[1]).found.every((piece) => piece.length <= 1500));
});

test("bare Python is told from prose", () => {
  for (const text of ["    return x", "\n\tif x:", "def f(x):\n", "class A:", "from a.b import c", ">>> 1"])
    assert.ok(isBareCode(text), text);
  assert.ok(isBareCode("# A comment.\n# Another.\n\nimport sys\n"), "comments tell nothing");
  for (const text of ["# Title\n", "# Title\n\nA paragraph.\n", "## Part\n", "Here is a class:\n", "importantly, no", "- a list", "```python\n"])
    assert.ok(!isBareCode(text), text);
});

// As much of the DOM as colouring needs.
class Element {
  children = [];
  append(...added) { this.children.push(...added); }
  replaceChildren(...added) { this.children = added; }
  get textContent() { return this.children.map((one) => one.textContent ?? one).join(""); }
}

test("coloured code is the same text in every language", async () => {
  const frames = [];
  globalThis.requestAnimationFrame = (paint) => frames.push(paint);
  globalThis.document = { createElement: () => new Element(), createDocumentFragment: () => new Element() };
  const samples = {
    python: "@a\ndef f(x: int = 1):\n    '''s'''\n    return f\"{x!r}\" # c\ny => 2\n",
    js: "class A { a = `${1 + 2}`; b = /re/g }", ts: "let a: Array<number> = [];", json: '{"a": [1, true]}',
    html: "<a href='x'>&amp;<script>let a = 1</script>", bash: 'for i in $(ls); do echo "$i"; done # x',
    c: "#include <x.h>\nint f(void);", cpp: "template <class T> auto f(T x) { return x; }", go: "func main() {}",
    rust: 'fn main() { println!("{}", 1); }', java: "class A<T> { int x = 1; }", sql: "select 'a' from b;",
    yaml: "a: [1, 'b'] # c", diff: "--- a\n+++ b\n+x\n",
  };
  for (const [language, text] of Object.entries(samples)) {
    const element = new Element();
    element.append(text);
    await new Colours(language).add(element);
    frames.splice(0).forEach((paint) => paint());
    assert.equal(element.textContent, text, language);
    assert.notEqual(element.children[0], text, `${language} has colours`);
  }
});

test("only what was typed is sent, as numbers", () => {
  const typed = { temperature: "0", top_p: " ", seed: "7", stop: "\\n\\n\nEND\n" };
  assert.deepEqual(sampling(typed), { temperature: 0, seed: 7, stop: ["\n\n", "END"] });
  assert.throws(() => sampling({ top_k: "many" }), /top_k: 'many' is no number/);
  assert.throws(() => sampling({ seed: "9007199254740993" }), /seed/);
  assert.deepEqual(body("chat", null, { messages: [] }, {}, false), {
    messages: [], stream: true, stream_options: { include_usage: true },
  });
});

test("the command quotes for a shell and shows no key", () => {
  const told = curl("http://h/v1/completions", { prompt: "it's" }, true);
  assert.match(told, /it'\\''s/);
  assert.match(told, /Bearer \$API_KEY/);
});

test("text is found in chunks of both kinds", () => {
  const nothing = { text: "", reasoning: "", calls: [], tokens: [] };
  assert.deepEqual(piece({ choices: [{ text: "a" }] }), { ...nothing, text: "a" });
  assert.equal(piece({ choices: [] }), null);
  assert.deepEqual(piece({ choices: [{ delta: { reasoning: "r", reasoning_content: "r" } }] }), {
    ...nothing, reasoning: "r",
  });
  const call = { index: 1, id: "c", function: { name: "f", arguments: "{}" } };
  assert.deepEqual(piece({ choices: [{ delta: { tool_calls: [call] } }] }).calls, [
    { index: 1, id: "c", name: "f", arguments: "{}" },
  ]);
});

test("probabilities are found in chunks of both kinds", () => {
  const top_logprobs = [{ token: "a", logprob: -1 }, { token: "b", logprob: -2 }];
  const wanted = [{ text: "a", logprob: -1, top: [["a", -1], ["b", -2]] }];
  const content = [{ token: "a", logprob: -1, top_logprobs }];
  assert.deepEqual(piece({ choices: [{ delta: { content: "a" }, logprobs: { content } }] }).tokens, wanted);
  const logprobs = { tokens: ["a"], token_logprobs: [-1], top_logprobs: [{ a: -1, b: -2 }] };
  assert.deepEqual(piece({ choices: [{ text: "a", logprobs }] }).tokens, wanted);
});

test("a base URL is taken with and without a slash", () => {
  assert.equal(base(" http://h:1/v1/ "), "http://h:1/v1");
  assert.throws(() => base("h:1"), /no base URL/);
});
