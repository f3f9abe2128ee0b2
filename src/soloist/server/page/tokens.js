// The token view: every token apart, coloured by its probability; hovering or moving to one with the
// arrow keys names the alternatives.

const STEPS = [0.9, 0.5, 0.2, 0.05]; // lower bounds of the colours, from sure to unlikely

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return `${value < 0.1 ? "<0.1" : value.toFixed(value < 10 ? 1 : 0)} %`;
};
const written = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "·");

export class TokenView {
  #root;
  #tip;
  #tokens = [];
  #current = -1;

  // root: gets a span for each token. It can be focused, and its tip is an element beside it.
  constructor(root) {
    this.#root = root;
    root.classList.add("tokens");
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Tokens; the arrow keys go from one to the next");
    this.#tip = document.createElement("div");
    this.#tip.className = "tip";
    this.#tip.setAttribute("role", "status");
    this.#tip.hidden = true;
    root.after(this.#tip);
    const at = (event) => this.#spans.indexOf(event.target.closest("[data-token]"));
    root.addEventListener("pointerover", (event) => this.#show(at(event)));
    root.addEventListener("pointerdown", (event) => this.#show(at(event)));
    root.addEventListener("pointerleave", () => this.#show(-1));
    root.addEventListener("blur", () => this.#show(-1));
    root.addEventListener("keydown", (event) => this.#move(event));
  }

  get #spans() {
    return [...this.#root.querySelectorAll("[data-token]")];
  }

  add({ tokens, text }) {
    const spans = tokens.map((token) => {
      const span = document.createElement("span");
      span.dataset.token = this.#tokens.push(token) - 1;
      const likelihood = Math.exp(token.logprob);
      const step = STEPS.findIndex((least) => likelihood >= least);
      span.className = `likely-${step < 0 ? STEPS.length : step}`;
      span.textContent = token.text;
      return span;
    });
    // Text without log probabilities is shown as it is.
    this.#root.append(...(spans.length > 0 ? spans : [text]));
  }

  paint() {}

  get isBehind() {
    return false;
  }

  end() {}

  #move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined || this.#tokens.length === 0) return;
    event.preventDefault();
    const last = this.#tokens.length - 1;
    this.#show(Math.min(last, Math.max(0, this.#current + step)));
  }

  #show(index) {
    this.#root.querySelector(".current")?.classList.remove("current");
    this.#current = index;
    this.#tip.hidden = index < 0;
    if (index < 0) return;
    const span = this.#root.querySelector(`[data-token="${index}"]`);
    span.classList.add("current");
    const { text, logprob, top } = this.#tokens[index];
    const lines = [[text, logprob], ...top.filter(([other]) => other !== text)];
    this.#tip.replaceChildren(...lines.map(([other, value], i) => line(other, value, i === 0)));
    const box = span.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - this.#tip.offsetWidth - 8);
    const above = box.bottom + this.#tip.offsetHeight + 8 > innerHeight;
    this.#tip.style.left = `${Math.max(8, left)}px`;
    this.#tip.style.top = `${above ? box.top - this.#tip.offsetHeight - 4 : box.bottom + 4}px`;
  }
}

function line(text, logprob, isChosen) {
  const made = document.createElement("p");
  const [name, value] = ["code", "span"].map((tag) => document.createElement(tag));
  name.textContent = written(text);
  value.textContent = percent(logprob);
  made.className = isChosen ? "chosen" : "";
  made.append(name, value);
  return made;
}
