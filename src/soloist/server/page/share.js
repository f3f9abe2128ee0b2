// The result of a race as a link: all of it in the part behind '#', which browsers keep to
// themselves. What comes out of a link was made by anybody, so it is checked.

import { Recording } from "./recording.js";

const MOST_ARRIVALS = 300; // of each server; neighbours are put together beyond it
const MOST_CHARACTERS = 6000; // of each answer
const MOST_BYTES = 200_000; // of a link's contents

// {prompt, isShared, tokens, times, sides: [{name, recording}, …]} → text for a link.
export async function packed(result) {
  const sides = result.sides.map(({ name, recording }) => ({ name, ...compact(recording) }));
  const bytes = new TextEncoder().encode(JSON.stringify({ ...result, sides, version: 1 }));
  const small = await through(bytes, new CompressionStream("deflate-raw"));
  const text = Array.from(small, (byte) => String.fromCharCode(byte)).join("");
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// The same back.
export async function unpacked(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (letter) => letter.charCodeAt(0));
    const plain = await through(bytes, new DecompressionStream("deflate-raw"));
    return checked(JSON.parse(new TextDecoder().decode(plain)));
  } catch (error) {
    throw new Error(`the link holds no result of a race (${error.message})`);
  }
}

async function through(bytes, stream) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  const parts = [];
  let length = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    length += value.length;
    if (length > MOST_BYTES) throw new Error(`more than ${MOST_BYTES} bytes`);
    parts.push(value);
  }
}

function compact({ arrivals, source, tokens, finish }) {
  const step = Math.ceil(arrivals.length / MOST_ARRIVALS);
  const kept = [];
  let left = MOST_CHARACTERS;
  for (let i = 0; i < arrivals.length; i += step) {
    const some = arrivals.slice(i, i + step);
    const { ms, total } = some.at(-1);
    const text = some.map(({ piece }) => piece.reasoning + piece.text).join("").slice(0, left);
    left -= text.length;
    // The first one stands for itself, or the time to the first token would move.
    if (i === 0 && step > 1) kept.push([some[0].ms, some[0].total, ""]);
    kept.push([Math.round(10 * ms) / 10, total, text]);
  }
  return { source, tokens, finish, arrivals: kept };
}

function checked(given) {
  const isCount = (value) => typeof value === "number" && Number.isFinite(value) && value >= 0;
  const need = (is) => {
    if (!is) throw new Error("a field is missing or of another kind");
  };
  need(given.version === 1 && typeof given.prompt === "string" && typeof given.isShared === "boolean");
  need(given.tokens === null || isCount(given.tokens));
  need(Array.isArray(given.times) && given.times.length === 2 && given.sides?.length === 2);
  for (const times of given.times) need(Array.isArray(times) && times.length > 0 && times.every(isCount));
  const sides = given.sides.map(({ name, source, tokens, finish, arrivals }) => {
    need(typeof name === "string" && ["usage", "total", "chunks"].includes(source) && isCount(tokens));
    need(Array.isArray(arrivals) && arrivals.length > 0 && arrivals.length <= MOST_ARRIVALS + 1);
    let before = 0;
    const found = arrivals.map(([ms, total, text]) => {
      need(isCount(ms) && ms >= before && ms < 3.6e6 && isCount(total) && typeof text === "string");
      before = ms;
      return { ms, total, text };
    });
    return { name, recording: Recording.of(found, { source, tokens, finish: String(finish) }) };
  });
  const { prompt, isShared, tokens, times } = given;
  return { prompt, isShared, tokens, times, sides };
}
