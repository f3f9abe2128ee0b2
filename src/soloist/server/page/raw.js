// The raw tab: requests as curl, and their events as they came.

const MOST_EVENTS = 2000;

export function showRaw(streams) {
  document.querySelector("#raw-none").hidden = streams.length > 0;
  document.querySelector("#raw-streams").replaceChildren(...streams.flatMap(raw));
}

function raw(stream) {
  const title = document.createElement("h2");
  title.textContent = `POST ${stream.url}`;
  const lines = stream.events.map(([ms, data]) => `${ms.toFixed(1).padStart(9)} ms  ${data}`);
  const left = lines.length - MOST_EVENTS;
  if (left > 0) lines.splice(MOST_EVENTS / 2, left, `… ${left} events are not shown …`);
  const told = lines.join("\n") || stream.problem || "no events";
  return [title, block("curl", stream.curl), ...copy(stream.curl), block("events", told)];
}

function block(name, text) {
  const made = document.createElement("pre");
  made.className = name;
  made.tabIndex = 0;
  made.textContent = text;
  return made;
}

// A button, where the browser has a clipboard for this page.
function copy(text) {
  if (!navigator.clipboard) return [];
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = "Copy";
  made.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    made.textContent = "Copied";
  });
  return [made];
}
