// What takes long at its first use is used once while the page is idle: rules of Markdown and
// grammars are compiled and fonts are found then, and not in the first frames of an answer.

import { preparations } from "./code.js";
import { whileIdle } from "./later.js";
import { Markdown } from "./markdown.js";

const SAMPLE = `# A title

A *word*, a **word**, \`code\`, ***both***, ~~none~~, [a link](mailto:a@b), <b>, a@b.example and a\\
line.

- one
- two

1. three

| a | b |
| - | - |
| 1 | 2 |

> A quotation.

---

\`\`\`python
# code
\`\`\`
`;

export function prepare() {
  return whileIdle([markdown, ...preparations]);
}

function markdown() {
  const root = document.createElement("div");
  root.className = "text unseen";
  root.ariaHidden = "true";
  const view = new Markdown(root);
  for (const piece of SAMPLE.match(/[^]{1,16}/g)) {
    view.add(piece);
    view.paint();
  }
  view.end();
  document.body.append(root);
  root.getBoundingClientRect(); // lays it out, in every font that it has
  root.remove();
}
