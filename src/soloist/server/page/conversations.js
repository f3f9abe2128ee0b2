// Conversations in the browser's storage, one entry each: {id, title, changed, messages}. Pure but
// for the storage that is handed in.

const PREFIX = "soloist.conversation.";
const TITLE_CHARACTERS = 48;

export class Conversations {
  #storage;

  // storage: localStorage, or null where it is forbidden.
  constructor(storage) {
    this.#storage = storage;
  }

  // All of them, the one that changed last first; what cannot be read is left alone.
  all() {
    const found = [];
    for (let i = 0; i < (this.#storage?.length ?? 0); i += 1) {
      const key = this.#storage.key(i);
      const one = key.startsWith(PREFIX) ? this.get(key.slice(PREFIX.length)) : null;
      if (one !== null) found.push(one);
    }
    return found.sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    try {
      const one = JSON.parse(this.#storage.getItem(PREFIX + id));
      return Array.isArray(one?.messages) && typeof one.title === "string" ? one : null;
    } catch {
      return null;
    }
  }

  // Whether there was room for it.
  save(conversation) {
    try {
      this.#storage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      return false;
    }
  }

  remove(id) {
    this.#storage?.removeItem(PREFIX + id);
  }
}

export const begun = () => ({ id: newId(), title: "", changed: Date.now(), messages: [] });

// Names of a page without HTTPS, where crypto.randomUUID is absent.
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function titled(messages) {
  const first = messages.find(({ role }) => role === "user")?.content ?? "";
  const line = first.trim().split("\n")[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1)}…` : line;
}

// The messages of a request: what a server takes of what is kept.
export function asked(messages, system) {
  const told = messages.map(({ role, content, calls, call_id: id }) => {
    if (role === "tool") return { role, content, tool_call_id: id };
    if (role !== "assistant" || !calls?.length) return { role, content };
    const made = calls.map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
    return { role, content, tool_calls: made };
  });
  return system ? [{ role: "system", content: system }, ...told] : told;
}

// A conversation to read elsewhere.
export function asMarkdown({ title, messages }) {
  const parts = messages.map(({ role, content, reasoning, calls }) => {
    const thought = reasoning ? `> ${reasoning.trim().replaceAll("\n", "\n> ")}\n\n` : "";
    const called = (calls ?? []).map((call) => `\n\n\`${call.name}(${call.arguments})\``).join("");
    return `## ${role}\n\n${thought}${content}${called}`;
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n`;
}
