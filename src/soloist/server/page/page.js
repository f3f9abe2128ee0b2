// The page: its tabs, forms and keys. What is sent and how it is timed lies beside it.

import { base, body, sampling } from "./ask.js";
import { shown } from "./meter.js";
import { Pane } from "./pane.js";
import { headers, messageOf, Stream } from "./stream.js";

const MOST_EVENTS_SHOWN = 2000;
const HEALTH_MS = 1000;
const NAME_MS = 5000; // for another server to say what it serves

const find = (selector, root = document) => root.querySelector(selector);
const here = { base: new URL("v1", document.baseURI).href, cancels: true };
const [chatForm, completeForm, raceForm] = ["#chat", "#complete", "#race"].map((id) => find(`${id} form`));
const [chatPane, completePane, ourPane, otherPane] = [...document.querySelectorAll(".pane")].map(
  (root) => new Pane(root),
);
const log = find("#log");
const messages = [];
let model = null;
let streams = []; // of the latest request, or of both in a race
let isBusy = false;
let isStopped = false;

// ---- requests -------------------------------------------------------------------------------

const typed = () => Object.fromEntries(new FormData(find("#sampling")));
const thisServer = () => ({ ...here, key: find("#key").value.trim() });

async function chat() {
  const content = chatForm.message.value;
  if (content.trim() === "") return;
  const system = chatForm.system.value;
  const asked = { role: "user", content };
  const given = [...(system ? [{ role: "system", content: system }] : []), ...messages, asked];
  const stream = new Stream(thisServer(), "chat", body("chat", model, { messages: given }, sampling(typed())));
  const question = article("user", content);
  const answer = article("assistant");
  chatForm.message.value = "";
  log.scrollTop = log.scrollHeight;
  streams = [stream];
  await chatPane.run(stream, { ...answer, scroller: log });
  const text = answer.text.textContent;
  if (stream.problem !== null && text === "") {
    // Nothing was answered: the message may be sent again.
    question.root.remove();
    answer.root.remove();
    chatForm.message.value ||= content;
  } else messages.push(asked, { role: "assistant", content: text });
}

function article(role, content = "") {
  const root = document.createElement("article");
  const title = document.createElement("h3");
  const [reasoning, text] = ["reasoning", "text"].map((name) => element("div", name));
  root.className = role;
  title.textContent = role;
  text.textContent = content;
  root.append(title, reasoning, text);
  log.append(root);
  return { root, reasoning, text };
}

async function complete() {
  const prompt = completeForm.prompt.value;
  const suffix = completeForm.suffix.value;
  const input = { prompt, ...(suffix !== "" && { suffix }) };
  const stream = new Stream(
    thisServer(), "completion", body("completion", model, input, sampling(typed())),
  );
  const output = find("#completion");
  const [before, text, after] = ["given", "made", "given"].map((name) => element("span", name));
  before.textContent = prompt;
  after.textContent = suffix;
  output.replaceChildren(before, text, after);
  streams = [stream];
  await completePane.run(stream, { text, reasoning: text, scroller: output });
}

async function race() {
  const { kind, prompt, in_turn: inTurn, counts } = raceForm;
  const other = { base: base(raceForm.base.value), key: raceForm.key.value.trim(), cancels: false };
  const fields = sampling(typed());
  const input =
    kind.value === "chat"
      ? { messages: [{ role: "user", content: prompt.value }] }
      : { prompt: prompt.value };
  const theirs = raceForm.model.value.trim() || (await firstModel(other));
  if (isStopped) return;
  const lanes = [
    [ourPane, new Stream(thisServer(), kind.value, body(kind.value, model, input, fields))],
    [otherPane, new Stream(other, kind.value, body(kind.value, theirs, input, fields, counts.checked))],
  ];
  streams = lanes.map(([, stream]) => stream);
  const outputs = document.querySelectorAll("#race .output");
  for (const [pane] of lanes) pane.clear();
  for (const output of outputs) output.replaceChildren();
  const run = ([pane, stream], index) => {
    const [reasoning, text] = ["reasoning", "text"].map((name) => element("div", name));
    outputs[index].append(reasoning, text);
    return pane.run(stream, { text, reasoning, scroller: outputs[index] });
  };
  if (inTurn.checked) {
    for (const [index, lane] of lanes.entries()) if (!isStopped) await run(lane, index);
  } else await Promise.all(lanes.map(run));
  find("#verdict").textContent = verdict(...streams.map((stream) => stream.meter));
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

function verdict(ours, theirs) {
  if (!ours?.decode || !theirs?.decode) return "";
  const ratio = ours.decode / theirs.decode;
  const isSure = ours.source === "usage" && theirs.source === "usage";
  return (
    `Decode: ${shown.speed(ours.decode)} here, ${shown.speed(theirs.decode)} there, ${ratio.toFixed(2)} ×` +
    (isSure ? "" : " (not counted in the same way: see below)")
  );
}

function element(tag, name) {
  const made = document.createElement(tag);
  made.className = name;
  return made;
}

const ACTIONS = {
  chat: [chat, chatPane],
  complete: [complete, completePane],
  race: [race, ourPane],
};

async function send(name) {
  if (isBusy || !(name in ACTIONS)) return;
  const [action, pane] = ACTIONS[name];
  isBusy = true;
  isStopped = false;
  find("#verdict").textContent = "";
  showButtons(name);
  try {
    await action();
  } catch (error) {
    pane.fail(error.message); // of what was typed
  }
  isBusy = false;
  showButtons(name);
  showRaw();
}

function stop() {
  isStopped = true;
  for (const stream of streams) stream.stop();
}

function showButtons(name) {
  // A button that is disabled loses the focus: hand it to the one that takes over.
  const [go, halt] = [".send", ".stop"].map((kind) => find(`#${name} ${kind}`));
  const [used, next] = isBusy ? [go, halt] : [halt, go];
  const hasFocus = document.activeElement === used;
  for (const button of document.querySelectorAll("button.send")) button.disabled = isBusy;
  for (const button of document.querySelectorAll("button.stop")) button.disabled = !isBusy;
  find("#clear").disabled = isBusy;
  if (hasFocus) next.focus();
}

// ---- the raw tab ----------------------------------------------------------------------------

function showRaw() {
  find("#raw-none").hidden = streams.length > 0;
  find("#raw-streams").replaceChildren(...streams.flatMap(rawOf));
}

function rawOf(stream) {
  const title = document.createElement("h2");
  title.textContent = `POST ${stream.url}`;
  const command = document.createElement("pre");
  command.className = "curl";
  command.tabIndex = 0;
  command.textContent = stream.curl;
  const copy = document.createElement("button");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(stream.curl);
    copy.textContent = "Copied";
  });
  const events = document.createElement("pre");
  events.className = "events";
  events.tabIndex = 0;
  const lines = stream.events.map(([ms, data]) => `${ms.toFixed(1).padStart(9)} ms  ${data}`);
  const left = lines.length - MOST_EVENTS_SHOWN;
  if (left > 0) lines.splice(MOST_EVENTS_SHOWN / 2, left, `… ${left} events are not shown …`);
  events.textContent = lines.join("\n") || stream.problem || "no events";
  return [title, command, ...(navigator.clipboard ? [copy] : []), events];
}

// ---- tabs, keys, theme ----------------------------------------------------------------------

const tabs = [...document.querySelectorAll('[role="tab"]')];
const chosen = () => tabs.find((tab) => tab.ariaSelected === "true").getAttribute("aria-controls");

function choose(tab) {
  for (const other of tabs) {
    const isChosen = other === tab;
    other.ariaSelected = String(isChosen);
    other.tabIndex = isChosen ? 0 : -1;
    find(`#${other.getAttribute("aria-controls")}`).hidden = !isChosen;
  }
  if (chosen() === "raw") showRaw();
}

for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
find("#tabs").addEventListener("keydown", ({ key }) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (step === undefined) return;
  const next = tabs.at((tabs.indexOf(document.activeElement) + step) % tabs.length);
  next.focus();
  choose(next);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send(chosen());
  } else if (event.key === "Escape" && isBusy) stop();
});

for (const name of Object.keys(ACTIONS)) {
  find(`#${name} form`).noValidate = true; // this page and the server say what is wrong
  find(`#${name} form`).addEventListener("submit", (event) => {
    event.preventDefault();
    send(name);
  });
  find(`#${name} .stop`).addEventListener("click", stop);
}
find("#sampling").addEventListener("submit", (event) => event.preventDefault());
find("#clear").addEventListener("click", () => {
  messages.length = 0;
  log.replaceChildren();
  chatPane.clear();
  chatForm.message.focus();
});

// Storage may be forbidden; the page then forgets.
function kept(storage, name, value) {
  try {
    if (value === undefined) return window[storage].getItem(name);
    window[storage].setItem(name, value);
  } catch {
    /* forbidden */
  }
  return null;
}

const root = document.documentElement;
const remembered = kept("localStorage", "theme");
if (remembered) root.dataset.theme = remembered;
find("#theme").addEventListener("click", () => {
  const isDark = getComputedStyle(root).colorScheme === "light dark"
    ? matchMedia("(prefers-color-scheme: dark)").matches
    : root.dataset.theme === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  kept("localStorage", "theme", root.dataset.theme);
});

// Keys stay in this tab of the browser and end with it.
for (const [name, input] of [["key", find("#key")], ["other-key", raceForm.key]]) {
  input.value = kept("sessionStorage", name) ?? "";
  input.addEventListener("change", () => kept("sessionStorage", name, input.value));
}
find("#key").addEventListener("change", look);
if (matchMedia("(max-width: 50rem)").matches) find("#sampling details").open = false;

// ---- the server's state ---------------------------------------------------------------------

// Until it is ready, again and again; then what it serves.
async function look() {
  const line = find("#server");
  try {
    const reply = await fetch(new URL("health", document.baseURI));
    const health = await reply.json();
    if (health.status === "ready") await showModel(line, health);
    else {
      const progress = health.progress === undefined ? "" : ` ${Math.round(health.progress * 100)} %`;
      line.textContent = `${health.status}${progress} ${health.reason ?? ""}`;
      setTimeout(look, HEALTH_MS);
    }
  } catch {
    line.textContent = "the server does not answer";
    setTimeout(look, HEALTH_MS);
  }
}

async function showModel(line, health) {
  model = health.model;
  const told = `${model} · ${health.device} · ${health.executor}`;
  const reply = await fetch(`${here.base}/models`, { headers: headers(thisServer().key) });
  if (!reply.ok) {
    line.textContent = `${told} · ${messageOf(await reply.text())}`;
    return;
  }
  const { data } = await reply.json();
  line.textContent = `${told} · ${data[0].max_model_len.toLocaleString("en")} tokens of context`;
  find("#suffix").hidden = !data[0].fills_in;
}

look();
