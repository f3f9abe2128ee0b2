// The page: its tabs, forms and keys. What is sent and how it is shown lies beside it.

import { sampling } from "./ask.js";
import { Chat } from "./chat.js";
import { complete } from "./complete.js";
import { EXAMPLES } from "./examples.js";
import { formFields } from "./forms.js";
import { Pane } from "./pane.js";
import { prepare } from "./prepare.js";
import { Race } from "./race.js";
import { showRaw } from "./raw.js";
import { look } from "./server.js";
import { recall, remember, storageOf } from "./storage.js";

const PHONE = matchMedia("(max-width: 56rem)");
const TOP_TOKENS = 5; // alternatives in the token view

const find = (selector, root = document) => root.querySelector(selector);
const [chatPane, completePane, ...racePanes] = [...document.querySelectorAll(".pane")].map((root) => new Pane(root));
let model = null;
let streams = []; // of the latest request, or of both in a race
let isBusy = false;
let isStopped = false;

// ---- requests -------------------------------------------------------------------------------

const settings = () => Object.fromEntries(new FormData(find("#settings")));
const page = {
  server: () => ({ base: new URL("v1", document.baseURI).href, cancels: true, key: find("#key").value.trim() }),
  model: () => model,
  isBusy: () => isBusy,
  showsTokens: () => find("#settings").tokens.checked,
  // What was set; without the token view where speed is compared, since probabilities take time.
  fields(kind, { isTimed = false } = {}) {
    const likely = kind === "chat" ? { logprobs: true, top_logprobs: TOP_TOKENS } : { logprobs: TOP_TOKENS };
    return {
      ...sampling(settings()), ...formFields(settings(), kind), ...(page.showsTokens() && !isTimed && likely),
    };
  },
  send,
  play: (action) => busy("race", action),
};

const chat = new Chat(page, chatPane, storageOf("localStorage"));
const race = new Race(page, racePanes);

const started = (now) => {
  streams = [now].flat();
  if (isStopped) stop();
};
const ACTIONS = {
  chat: () => chat.send(started),
  regenerate: () => chat.regenerate(started),
  result: (...given) => chat.result(...given, started),
  complete: () => complete(page, completePane, started),
  race: () => race.run(started),
};
const TABS = { regenerate: "chat", result: "chat" };
const PANES = { chat: chatPane, complete: completePane, race: racePanes[0] };

function send(name, ...given) {
  if (name in ACTIONS) return busy(TABS[name] ?? name, () => ACTIONS[name](...given));
}

async function busy(name, action) {
  if (isBusy) return;
  isBusy = true;
  isStopped = false;
  showButtons(name);
  try {
    await action();
  } catch (error) {
    PANES[name].fail(error.message); // of what was typed
  }
  isBusy = false;
  showButtons(name);
  if (chosen() === "raw") showRaw(streams);
}

function stop() {
  isStopped = true;
  race.stop();
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

// ---- tabs and keys --------------------------------------------------------------------------

const tabs = [...document.querySelectorAll('[role="tab"]')];
const chosen = () => tabs.find((tab) => tab.ariaSelected === "true").getAttribute("aria-controls");

function choose(tab) {
  for (const other of tabs) {
    const isChosen = other === tab;
    other.ariaSelected = String(isChosen);
    other.tabIndex = isChosen ? 0 : -1;
    find(`#${other.getAttribute("aria-controls")}`).hidden = !isChosen;
  }
  if (chosen() === "raw") showRaw(streams);
  for (const pane of [chatPane, completePane, ...racePanes]) pane.draw();
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
  if (event.key === "Escape" && isBusy) stop();
  else if (event.key === "Enter" && !event.isComposing && sends(event)) {
    event.preventDefault();
    send(chosen());
  }
});

// Enter sends a message, where Shift breaks the line; elsewhere Enter is what it always is.
function sends(event) {
  if (event.ctrlKey || event.metaKey) return true;
  return event.target.name === "message" && !event.shiftKey;
}

for (const name of ["chat", "complete", "race"]) {
  const form = find(`#${name} form`);
  form.noValidate = true; // this page and the server say what is wrong
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(name);
  });
  find(`#${name} .stop`).addEventListener("click", stop);
}
find("#settings").addEventListener("submit", (event) => event.preventDefault());

for (const kind of ["json", "md"])
  find(`#export-${kind}`).addEventListener("click", () => {
    const anchor = document.createElement("a");
    anchor.href = URL.createObjectURL(new Blob([chat.exported[kind]], { type: "text/plain" }));
    anchor.download = `conversation.${kind}`;
    anchor.click();
    URL.revokeObjectURL(anchor.href);
  });

// ---- what the browser remembers -------------------------------------------------------------

const root = document.documentElement;
const theme = recall("localStorage", "theme");
if (theme) root.dataset.theme = theme;
find("#theme").addEventListener("click", () => {
  const isDark = root.dataset.theme === undefined
    ? matchMedia("(prefers-color-scheme: dark)").matches
    : root.dataset.theme === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  remember("localStorage", "theme", root.dataset.theme);
  for (const pane of [chatPane, completePane, ...racePanes]) pane.draw();
});

// Keys stay in this tab of the browser and end with it.
for (const [name, input] of [["key", find("#key")], ["other-key", find("#race form").key]]) {
  input.value = recall("sessionStorage", name) ?? "";
  input.addEventListener("change", () => remember("sessionStorage", name, input.value));
}
if (PHONE.matches) for (const details of document.querySelectorAll("aside details")) details.open = false;

// ---- the start ------------------------------------------------------------------------------

let isFirst = true;
const ask = () =>
  look(find("#server"), () => find("#key").value.trim(), ({ model: found, fillsIn }) => {
    model = found;
    find("#suffix").hidden = !fillsIn;
    if (!isFirst) return;
    isFirst = false;
    const shared = /^#race=(.+)/.exec(location.hash);
    if (shared) {
      choose(find("#tab-race"));
      busy("race", () => race.open(shared[1]));
    } else if (new URLSearchParams(location.search).has("demo")) chat.start(EXAMPLES[0].message);
  });
find("#key").addEventListener("change", ask);
ask();
prepare();
