// The strip: every token where it came in time, in the colour of its kind; and the line of the
// latest speeds. Counting is apart from drawing, so that a frame costs the same at any speed.

export const KINDS = ["made", "forced", "drafted"];
const COLOURS = [...KINDS, "line", "cached", "read", "quiet"];
const COLUMNS = 240;
const FIRST_WIDTH_MS = 5; // of a column, until the time does not fit any more
const LABELS = 14; // pixels above the columns
const LINE_MS = 8000;

// Tokens of each kind in columns of time, which get twice as wide whenever time runs out of them.
export class Columns {
  widthMs = FIRST_WIDTH_MS;
  counts = Object.fromEntries(KINDS.map((kind) => [kind, new Float64Array(COLUMNS)]));

  add(ms, arrival) {
    this.reach(ms);
    const column = Math.floor(ms / this.widthMs);
    for (const kind of KINDS) this.counts[kind][column] += arrival[kind];
  }

  // Wide enough for a time.
  reach(ms) {
    while (ms >= COLUMNS * this.widthMs) this.#double();
  }

  get tallest() {
    const { made, forced, drafted } = this.counts;
    let most = 1;
    for (let i = 0; i < COLUMNS; i += 1) most = Math.max(most, made[i] + forced[i] + drafted[i]);
    return most;
  }

  #double() {
    this.widthMs *= 2;
    for (const counts of Object.values(this.counts)) {
      for (let i = 0; i < COLUMNS / 2; i += 1) counts[i] = counts[2 * i] + counts[2 * i + 1];
      counts.fill(0, COLUMNS / 2);
    }
  }
}

// A canvas in the colours of the style sheet, as sharp as the screen. Its size and the colours are
// looked up by `measure` alone: that makes a browser lay out what has changed.
export class Surface {
  width = 0;
  height = 0;
  #canvas;
  #colours = {};
  #ratio = 1;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  measure() {
    const canvas = this.#canvas;
    this.#ratio = globalThis.devicePixelRatio ?? 1;
    [this.width, this.height] = [canvas.clientWidth, canvas.clientHeight];
    const sizes = [this.width, this.height].map((size) => Math.round(size * this.#ratio));
    if (canvas.width !== sizes[0]) canvas.width = sizes[0];
    if (canvas.height !== sizes[1]) canvas.height = sizes[1];
    const style = getComputedStyle(canvas);
    for (const name of COLOURS) this.#colours[name] = style.getPropertyValue(`--${name}`);
  }

  get pen() {
    const pen = this.#canvas.getContext("2d");
    pen.setTransform(this.#ratio, 0, 0, this.#ratio, 0, 0);
    return pen;
  }

  colour = (name) => this.#colours[name];

  // The same with nothing on it.
  get cleared() {
    const { pen, width, height, colour } = this;
    pen.clearRect(0, 0, width, height);
    return { pen, width, height, colour };
  }
}

// Columns as tall as their tokens; the whole height stands for `tallest` of them. While the scale stays
// the same, a frame draws the columns that have changed since the one before.
export class Strip {
  #surface;
  #drawn = null; // {scale, column}: what the canvas shows, up to the column of its time

  constructor(canvas) {
    this.#surface = new Surface(canvas);
  }

  measure() {
    this.#surface.measure();
    this.#drawn = null;
  }

  get isHidden() {
    return this.#surface.width === 0;
  }

  draw(columns, { ttft, share, ms }, tallest) {
    columns.reach(ms);
    const column = Math.floor(ms / columns.widthMs);
    const scale = [columns, columns.widthMs, tallest, ttft, share];
    const isSame = this.#drawn?.scale.every((one, i) => one === scale[i]) ?? false;
    const from = Math.min(this.#drawn?.column ?? 0, column);
    const isBehindFirst = ttft !== null && from > ttft / columns.widthMs + 1;
    if (isSame && isBehindFirst) this.#drawColumns(columns, tallest, from, column);
    else this.#drawAll(columns, { ttft, share, ms }, tallest);
    this.#drawn = { scale, column };
  }

  #drawAll(columns, { ttft, share, ms }, tallest) {
    const { pen, width, height, colour } = this.#surface.cleared;
    const perMs = width / (COLUMNS * columns.widthMs);
    pen.fillStyle = colour("line");
    pen.fillRect(0, height - 1, width, 1);
    const read = (ttft ?? ms) * perMs;
    const band = height * 0.4;
    pen.fillStyle = colour("cached");
    pen.fillRect(0, height - band, read * share, band);
    pen.fillStyle = colour("read");
    pen.fillRect(read * share, height - band, read * (1 - share), band);
    pen.fillStyle = colour("quiet");
    if (ttft !== null) pen.fillRect(read, 0, 1, height); // below the tokens that came with the first
    this.#put(columns, tallest, 0, COLUMNS - 1);
    pen.fillStyle = colour("quiet");
    pen.font = "11px system-ui, sans-serif";
    if (ttft !== null) {
      const isLeft = read > width / 2;
      pen.textAlign = isLeft ? "right" : "left";
      pen.fillText("first token", read + (isLeft ? -4 : 4), 10);
    }
    if (ms === 0) return; // nothing was sent: there is no time to name
    pen.textAlign = "right";
    pen.fillText(`${((COLUMNS * columns.widthMs) / 1000).toFixed(1)} s`, width, 10);
  }

  #drawColumns(columns, tallest, from, to) {
    const { pen, width, height, colour } = this.#surface;
    const [left, right] = [from, to + 1].map((column) => Math.round((column * width) / COLUMNS));
    pen.clearRect(left, LABELS, right - left, height - LABELS);
    pen.fillStyle = colour("line");
    pen.fillRect(left, height - 1, right - left, 1);
    this.#put(columns, tallest, from, to);
  }

  #put(columns, tallest, from, to) {
    const { pen, width, height, colour } = this.#surface;
    const step = width / COLUMNS;
    const gap = step > 3 ? 1 : 0;
    const bottoms = new Float64Array(COLUMNS).fill(height);
    for (const kind of KINDS) {
      pen.fillStyle = colour(kind);
      const counts = columns.counts[kind];
      for (let i = from; i <= to; i += 1) {
        if (counts[i] === 0) continue;
        const tall = Math.max(2, Math.round(((height - LABELS) * counts[i]) / tallest));
        const left = Math.round(i * step); // whole pixels are sharp
        pen.fillRect(left, bottoms[i] - tall, Math.max(1, Math.round((i + 1) * step) - left - gap), tall);
        bottoms[i] -= tall;
      }
    }
  }
}

// Speeds of the last seconds.
export class Line {
  points = []; // [ms, speed]

  add(ms, speed) {
    if (speed === null) return;
    this.points.push([ms, speed]);
    while (this.points.length > 2 && ms - this.points[1][0] > LINE_MS) this.points.shift();
  }

  draw(surface) {
    const { pen, width, height, colour } = surface.cleared;
    if (this.points.length < 2) return;
    const last = this.points.at(-1)[0];
    const most = 1.1 * Math.max(...this.points.map(([, speed]) => speed), 1);
    const start = Math.max(0, last - LINE_MS, this.points[0][0]);
    const span = Math.max(1000, last - start);
    pen.beginPath();
    for (const [ms, speed] of this.points)
      pen.lineTo(((ms - start) / span) * width, height - 1 - (speed / most) * (height - 2));
    pen.strokeStyle = colour("made");
    pen.lineWidth = 2;
    pen.stroke();
    pen.lineTo(width * ((last - start) / span), height);
    pen.lineTo(0, height);
    pen.globalAlpha = 0.15;
    pen.fillStyle = colour("made");
    pen.fill();
    pen.globalAlpha = 1;
  }
}
