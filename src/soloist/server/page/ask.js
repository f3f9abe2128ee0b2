// Requests: their fields, their shape as curl, and the text in what comes back.

export const PATHS = { chat: "/chat/completions", completion: "/completions" };

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "repetition_penalty", "presence_penalty", "frequency_penalty",
];

// Sampling fields from what was typed; what is empty is left to the server.
export function sampling(typed) {
  const fields = {};
  for (const name of NUMBERS) {
    const text = (typed[name] ?? "").trim();
    if (text === "") continue;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name}: '${text}' is no number`);
    if (Number.isInteger(value) && !Number.isSafeInteger(value))
      throw new Error(`${name}: ${text} is more than a browser counts to (2^53 - 1)`);
    fields[name] = value;
  }
  const stop = (typed.stop ?? "").split("\n").filter((line) => line !== "").map(unescaped);
  if (stop.length > 0) fields.stop = stop;
  return fields;
}

// A stop string is one line; \n, \t and \\ stand for what cannot be typed there.
function unescaped(line) {
  const known = { n: "\n", t: "\t", "\\": "\\" };
  return line.replace(/\\([nt\\])/g, (_, letter) => known[letter]);
}

export function body(kind, model, input, fields, isCounted = true) {
  const options = { include_usage: true, ...(isCounted && { continuous_usage_stats: true }) };
  return { ...(model && { model }), ...input, ...fields, stream: true, stream_options: options };
}

// The request as a command; a key is named, never shown.
export function curl(url, body, hasKey) {
  const parts = [`curl -N ${quoted(url)}`, `-H 'Content-Type: application/json'`];
  if (hasKey) parts.push('-H "Authorization: Bearer $API_KEY"');
  parts.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return parts.join(" \\\n  ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// What one chunk adds, or null where it adds nothing that can be seen. Calls are pieces of tool
// calls, tokens those with log probabilities: {text, logprob, top: [[text, logprob]]}.
export function piece(chunk) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const calls = (delta.tool_calls ?? []).map(({ index, id, function: made }) => ({
    index: index ?? 0, id, name: made?.name ?? "", arguments: made?.arguments ?? "",
  }));
  const found = {
    text: choice?.text ?? delta.content ?? "",
    reasoning: delta.reasoning ?? delta.reasoning_content ?? "",
    calls,
    tokens: likely(choice?.logprobs),
  };
  const isEmpty = found.text === "" && found.reasoning === "" && calls.length === 0;
  return isEmpty && found.tokens.length === 0 ? null : found;
}

// Log probabilities, in the shape of chats or in that of completions.
function likely(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content)
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token, logprob, top: (top ?? []).map((one) => [one.token, one.logprob]),
    }));
  return (logprobs.tokens ?? []).map((text, i) => ({
    text, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  }));
}

// 'http://host:8000/v1/' → 'http://host:8000/v1'
export function base(typed) {
  const text = typed.trim().replace(/\/+$/, "");
  const url = URL.canParse(text) ? new URL(text) : null;
  if (!url || !/^https?:$/.test(url.protocol))
    throw new Error(`'${typed}' is no base URL (expected: http://HOST:PORT/v1)`);
  return text;
}
