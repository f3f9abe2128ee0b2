// The result of a race as a picture to share: 1200 × 630, the size that links are shown with.

import { shown } from "./figures.js";
import { Columns } from "./strip.js";
import { verdict } from "./verdict.js";

const [WIDTH, HEIGHT, LEFT] = [1200, 630, 60];
const COLOURS = { back: "#14161a", text: "#e6e8ec", quiet: "#a0a8b8", lanes: ["#7ab0ff", "#e3b341"] };
const FONT = "system-ui, sans-serif";

// A PNG, as a blob.
export function picture(result) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDTH, HEIGHT];
  const pen = canvas.getContext("2d");
  const write = (text, x, y, size, colour, weight = "") => {
    pen.fillStyle = colour;
    pen.font = `${weight} ${size}px ${FONT}`;
    pen.fillText(text, x, y, WIDTH - x - LEFT);
  };
  pen.fillStyle = COLOURS.back;
  pen.fillRect(0, 0, WIDTH, HEIGHT);
  const { headline, details } = verdict(result);
  write(headline, LEFT, 100, 52, COLOURS.text, "bold");
  write(details, LEFT, 145, 24, COLOURS.quiet);
  const span = Math.max(...result.sides.map(({ recording }) => recording.last));
  const lanes = result.sides.map(({ recording }) => columnsOf(recording, span));
  const tallest = Math.max(...lanes.map((columns) => columns.tallest)); // one scale for both
  for (const [index, { name, recording }] of result.sides.entries()) {
    const top = 200 + 190 * index;
    write(name, LEFT, top, 26, COLOURS.text, "bold");
    write(`${shown.speed(recording.decode)} tokens/s · first token after ${shown.ms(recording.ttft)} ms`, LEFT, top + 34, 22, COLOURS.quiet);
    tokens(pen, lanes[index], { top: top + 50, tall: 80, span, tallest, colour: COLOURS.lanes[index] });
  }
  const how = result.isShared ? "one machine, so one after the other; true speed" : "at the same time";
  write(`Soloist’s playground · ${how} · ${result.prompt.split("\n")[0].slice(0, 80)}`, LEFT, HEIGHT - 36, 20, COLOURS.quiet);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function columnsOf(recording, span) {
  const columns = new Columns();
  columns.reach(span);
  for (const { ms, made, forced, drafted } of recording.arrivals)
    columns.add(ms, { made: made + forced + drafted, forced: 0, drafted: 0 });
  return columns;
}

function tokens(pen, columns, { top, tall, span, tallest, colour }) {
  const { made } = columns.counts;
  const step = (WIDTH - 2 * LEFT) / Math.ceil((span + 1) / columns.widthMs);
  pen.fillStyle = COLOURS.quiet;
  pen.fillRect(LEFT, top + tall, WIDTH - 2 * LEFT, 1);
  pen.fillStyle = colour;
  for (const [i, count] of made.entries()) {
    const height = count === 0 ? 0 : Math.max(3, (tall * count) / tallest);
    pen.fillRect(LEFT + i * step, top + tall - height, Math.max(1, step - 1), height);
  }
}
