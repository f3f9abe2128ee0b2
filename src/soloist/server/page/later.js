// Work that no frame waits for: in small steps, for a few ms of each frame, and not at all while frames
// have more to do; and what is made ready while nothing happens.

const MOST_MS = 2;
const IDLE_MS = 30; // a browser promises as much only where no frame is awaited

const PAUSE_MS = 100;

const steps = [];
let isAsked = false;
let busyUntil = 0;

export function later(step) {
  steps.push(step);
  ask();
}

// This frame has enough to do, and so have probably the next ones.
export function putOff() {
  busyUntil = performance.now() + PAUSE_MS;
}

function ask() {
  if (isAsked || steps.length === 0) return;
  isAsked = true;
  const pause = busyUntil - performance.now();
  if (pause > 0) {
    setTimeout(() => {
      isAsked = false;
      ask();
    }, pause);
    return;
  }
  requestAnimationFrame(() => {
    isAsked = false;
    if (performance.now() < busyUntil) {
      ask();
      return;
    }
    const until = performance.now() + MOST_MS;
    do steps.shift()();
    while (steps.length > 0 && performance.now() < until);
    ask();
  });
}

// Does all of it in turn, each while the page is idle; not at all where a browser cannot tell.
export async function whileIdle(actions) {
  if (!globalThis.requestIdleCallback) return;
  for (const action of actions) {
    await idle();
    await action();
  }
}

const idle = () =>
  new Promise((done) => {
    const look = (deadline) => {
      if (deadline.timeRemaining() >= IDLE_MS) done();
      else setTimeout(() => requestIdleCallback(look), 100);
    };
    requestIdleCallback(look);
  });
