// What the playground computes, without a browser: node --test tests/server/page_test.mjs

import assert from "node:assert/strict";
import { test } from "node:test";

const at = "../../src/soloist/server/page";
const { EventReader } = await import(`${at}/sse.js`);
const { Meter } = await import(`${at}/meter.js`);
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

const chunk = (completion_tokens) => ({
  choices: [{ delta: { content: "x" } }],
  ...(completion_tokens !== undefined && { usage: { completion_tokens } }),
});

test("decode speed is tokens between the first and the last chunk over their time", () => {
  const meter = new Meter(1000);
  meter.see({ choices: [{ delta: { role: "assistant", content: "" } }] }, false, 1010);
  assert.equal(meter.ttft, null); // a role is no token
  meter.see(chunk(4), true, 1020);
  assert.equal(meter.ttft, 20);
  assert.equal(meter.decode, null); // no time has passed
  meter.see(chunk(8), true, 1030);
  meter.see(chunk(24), true, 1040);
  meter.see({ choices: [], usage: { completion_tokens: 25 } }, false, 1090);
  assert.equal(meter.source, "usage");
  assert.equal(meter.decode, 1000); // (24 - 4) / 20 ms, whatever comes without text
  assert.equal(meter.tokens, 25);
});

test("without usage in every chunk the total counts, without any the chunks do", () => {
  const meter = new Meter(0);
  for (const now of [10, 20, 30]) meter.see(chunk(), true, now);
  assert.equal(meter.source, "chunks");
  assert.equal(meter.decode, 100);
  meter.see({ choices: [], usage: { completion_tokens: 9 } }, false, 35);
  assert.equal(meter.source, "total");
  assert.equal(meter.decode, 400);
});

test("recent speed forgets what is long ago", () => {
  const meter = new Meter(0);
  meter.see(chunk(1), true, 0);
  assert.equal(meter.recent(0), null);
  for (let now = 100; now <= 2000; now += 100) {
    meter.see(chunk(now <= 1000 ? 1 : 1 + (now - 1000)), true, now);
    meter.recent(now);
  }
  assert.equal(meter.recent(2000.5).toFixed(0), "999");
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
  assert.deepEqual(piece({ choices: [{ text: "a" }] }), { text: "a", reasoning: "" });
  assert.deepEqual(piece({ choices: [] }), { text: "", reasoning: "" });
  assert.deepEqual(piece({ choices: [{ delta: { reasoning: "r", reasoning_content: "r" } }] }), {
    text: "", reasoning: "r",
  });
  const call = { function: { name: "f", arguments: "{}" } };
  assert.equal(piece({ choices: [{ delta: { tool_calls: [call] } }] }).text, "\nf {}");
});

test("a base URL is taken with and without a slash", () => {
  assert.equal(base(" http://h:1/v1/ "), "http://h:1/v1");
  assert.throws(() => base("h:1"), /no base URL/);
});
