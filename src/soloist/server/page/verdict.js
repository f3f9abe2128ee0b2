// Who took how long, in one sentence. Pure.

import { shown } from "./figures.js";

const ALIKE = 1.03; // ratios below are called equal

export function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 === 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// What two servers' runs have in common: the times in which each came to the same count of tokens.
// {tokens, times: [ours, theirs]}; without counts, tokens is null and the times are of whole answers.
export function compared(ours, theirs) {
  const all = [...ours, ...theirs];
  const isCounted = all.every(({ source }) => source !== "chunks");
  const tokens = Math.min(...all.map(({ arrivals, source, tokens: told }) =>
    source === "usage" ? arrivals.at(-1).total : told));
  const time = (recording) => (isCounted ? recording.msOf(tokens) : recording.last);
  return { tokens: isCounted ? tokens : null, times: [ours.map(time), theirs.map(time)] };
}

// The run whose time is the closest to the median.
export function typical(times) {
  const middle = median(times);
  const distances = times.map((time) => Math.abs(time - middle));
  return distances.indexOf(Math.min(...distances));
}

const seconds = (ms) => (ms < 1000 ? `${shown.ms(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
const times = (ratio) => `${ratio.toFixed(ratio < 10 ? 1 : 0)} times as long`;

// {headline, details}
export function verdict({ tokens, times: [ours, theirs] }) {
  const [here, there] = [median(ours), median(theirs)];
  const ratio = there / here;
  const headline =
    ratio >= ALIKE
      ? `The other took ${times(ratio)}.`
      : ratio <= 1 / ALIKE
        ? `This server took ${times(1 / ratio)}.`
        : "Both took equally long, within 3 %.";
  const what = tokens === null ? "whole answers, since one of them counts no tokens" : `${tokens} tokens`;
  const runs = ours.length === 1 ? "one run each" : `the median of ${ours.length} runs each`;
  return { headline, details: `${what}: ${seconds(here)} here, ${seconds(there)} there; ${runs}` };
}
