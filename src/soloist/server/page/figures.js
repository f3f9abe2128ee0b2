// How figures are written, and what they come from.

const round = (value) => value.toFixed(value < 100 ? 1 : 0);
const orDash = (write) => (value) => (value === null || value === undefined ? "–" : write(value));

export const shown = {
  speed: orDash((value) => (value < 1000 ? round(value) : Math.round(value).toLocaleString("en"))),
  ms: orDash(round),
  share: orDash((value) => `${(100 * value).toFixed(0)} %`),
  count: orDash((value) => value.toLocaleString("en")),
};

export const SOURCES = {
  usage: "tokens from the usage of every chunk",
  total: "tokens from the usage at the end; the first chunk is taken for one token",
  chunks: "counted in chunks, which may hold several tokens or none: the server sends no usage",
};

// The server's own account, where it sends llama.cpp's object.
export function toldBy(timings) {
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
