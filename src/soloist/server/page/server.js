// What the server serves: asked until it is ready.

import { headers, messageOf } from "./stream.js";

const HEALTH_MS = 1000;

// Shows the server's state in `line`; calls `ready({model, fills_in})` once it can be asked.
export async function look(line, key, ready) {
  const again = () => setTimeout(() => look(line, key, ready), HEALTH_MS);
  try {
    const reply = await fetch(new URL("health", document.baseURI));
    const health = await reply.json();
    if (health.status !== "ready") {
      const progress = health.progress === undefined ? "" : ` ${Math.round(health.progress * 100)} %`;
      line.textContent = `${health.status}${progress} ${health.reason ?? ""}`;
      again();
      return;
    }
    const told = `${health.model} · ${health.device} · ${health.executor}`;
    const models = await fetch(new URL("v1/models", document.baseURI), { headers: headers(key()) });
    const isLocked = models.status === 401;
    document.querySelector(".key").classList.toggle("needed", isLocked || key() !== "");
    if (!models.ok) {
      line.textContent = `${told} · ${messageOf(await models.text())}`;
      return;
    }
    const { data } = await models.json();
    line.textContent = `${told} · ${data[0].max_model_len.toLocaleString("en")} tokens of context`;
    ready({ model: health.model, fillsIn: data[0].fills_in });
  } catch {
    line.textContent = "the server does not answer";
    again();
  }
}
