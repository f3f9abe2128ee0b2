// A text that grows, in pieces: a browser lays out the last one anew, and leaves the others alone.

const ENOUGH = 600; // characters of a piece, at least
const MOST = 1500; // and about at most

// The length of the first piece of a text, or 0 where more text has to come. The same text is cut
// at the same places however it came: before a line that is not indented, or before any.
export function firstPiece(text) {
  if (text.length <= ENOUGH) return 0;
  const start = /\n(?=\S)/g;
  start.lastIndex = ENOUGH - 1;
  const found = start.exec(text)?.index ?? -1;
  if (found >= 0 && found < MOST) return found + 1;
  if (text.length <= MOST) return 0;
  const end = text.lastIndexOf("\n", MOST - 1);
  return (end >= 0 ? end : text.indexOf("\n")) + 1;
}

export class Pieces {
  #root;
  #told;
  #isInline; // whether the first line goes on where the text before it ended
  #last = "";
  #node = new Text();

  // told: of the element of every piece that is over.
  constructor(root, { told = () => {}, isInline = false } = {}) {
    [this.#root, this.#told, this.#isInline] = [root, told, isInline];
    root.append(this.#node);
  }

  add(text) {
    if (text === "") return;
    this.#last += text;
    let length = firstPiece(this.#last);
    if (length === 0) {
      this.#node.appendData(text);
      return;
    }
    for (; length > 0; length = firstPiece(this.#last)) {
      this.#put(this.#last.slice(0, length));
      this.#last = this.#last.slice(length);
    }
    this.#node.data = this.#last;
  }

  // The rest is a piece, too.
  end() {
    if (this.#last !== "") this.#put(this.#last);
    this.#last = "";
    this.#node.remove();
  }

  #put(text) {
    const first = this.#isInline ? text.indexOf("\n") + 1 : 0;
    this.#isInline = false;
    const piece = document.createElement("span");
    piece.className = "piece";
    piece.append(text.slice(first));
    this.#node.before(text.slice(0, first), piece);
    this.#told(piece);
  }
}
