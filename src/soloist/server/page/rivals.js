// Servers to race against: where each listens by default, and how it is started so that it lets a
// page of another origin in (CORS). Pure.

export const RIVALS = {
  ollama: {
    name: "Ollama",
    base: "http://127.0.0.1:11434/v1",
    letsIn: (origin) => `OLLAMA_ORIGINS=${origin} ollama serve`,
  },
  llama_cpp: {
    name: "llama.cpp",
    base: "http://127.0.0.1:8080/v1",
    letsIn: (origin) => `llama-server -m MODEL.gguf --cors-origins ${origin}`,
  },
  vllm: {
    name: "vLLM",
    base: "http://127.0.0.1:8001/v1",
    letsIn: (origin) => `vllm serve MODEL --port 8001 --allowed-origins '["${origin}"]'`,
  },
  lm_studio: {
    name: "LM Studio",
    base: "http://127.0.0.1:1234/v1",
    letsIn: () => "lms server start --cors",
  },
  soloist: {
    name: "Soloist",
    base: "http://127.0.0.1:8002/v1",
    letsIn: (origin) => `soloist serve MODEL --port 8002 --cors-origin ${origin}`,
  },
};

// What to do where a server cannot be reached: `rival` is a key of RIVALS, or "" for another one.
export function advice(rival, origin) {
  if (rival in RIVALS) return `Is it running, and does it let this page in? Start it with: ${RIVALS[rival].letsIn(origin)}`;
  const flags = Object.values(RIVALS).map(({ name, letsIn }) => `${name}: ${letsIn(origin)}`);
  return `Is it running, and does it let pages of ${origin} in (CORS)? ${flags.join(" · ")}`;
}

// Whether two addresses are of one machine, as far as their names tell.
export function areNeighbours(one, other) {
  const name = (url) => (URL.canParse(url) ? new URL(url).hostname.replace(/^(localhost|\[::1\])$/, "127.0.0.1") : "");
  return name(one) === name(other);
}
