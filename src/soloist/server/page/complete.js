// The completion of a prompt, or of a gap in it.

import { body } from "./ask.js";
import { Stream } from "./stream.js";
import { TokenView } from "./tokens.js";
import { PlainView } from "./views.js";

export async function complete(page, pane, started) {
  const { prompt, suffix } = document.querySelector("#complete form");
  const input = { prompt: prompt.value, ...(suffix.value !== "" && { suffix: suffix.value }) };
  const asked = { ...input, ...page.fields("completion") };
  const stream = new Stream(page.server(), "completion", body("completion", page.model(), asked, {}));
  const output = document.querySelector("#completion");
  const [before, text, after] = ["given", "made", "given"].map((name) => {
    const made = document.createElement("span");
    made.className = name;
    return made;
  });
  before.textContent = prompt.value;
  after.textContent = suffix.value;
  output.replaceChildren(before, text, after);
  started([stream]);
  await pane.run(stream, page.showsTokens() ? new TokenView(text) : new PlainView(text, output));
}
