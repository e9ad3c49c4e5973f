// The console shows one view at a time, chosen by the address. Live views are refreshed without moving the focus.
import { warn } from "/console/elements.js";
import { overview } from "/console/overview.js";
import { policies } from "/console/policies.js";
import { samples } from "/console/samples.js";
import { sessions } from "/console/sessions.js";
import { trajectories } from "/console/trajectories.js";
import { deadLetters } from "/console/dead_letters.js";

const VIEWS = { overview, policies, trajectories, sessions, samples, "dead-letters": deadLetters };
const STILL = new Set(["trajectories", "sessions", "samples"]);
const LIVE_MS = 2000;
// How long a refresh by the clock leaves one under way alone. Otherwise a gateway that needs more than LIVE_MS for its
// answers would never be shown: each refresh would replace the one before it.
const PATIENCE_MS = 30000;
const main = document.getElementById("main");
const canHover = matchMedia("(hover: hover)");
let turn = 0, isPressed = false, begunAt = -Infinity;

// What comes after a slash is of the view: #sessions/NAME.
function view() {
  const name = location.hash.slice(1).split("/")[0];
  return Object.hasOwn(VIEWS, name) ? name : "overview";
}

// A refresh by the clock skips its turn while someone uses what would be replaced.
async function refresh(byClock = false) {
  if (byClock && performance.now() - begunAt < PATIENCE_MS) return;
  const mine = ++turn, name = view();
  begunAt = performance.now();
  try {
    const content = await VIEWS[name](() => refresh());
    if (mine !== turn || (byClock && isBusy())) return;
    const place = document.activeElement?.getAttribute?.("aria-label");
    main.replaceChildren(...content.filter(Boolean));
    main.dataset.view = name;
    if (place && document.activeElement === document.body)
      [...main.querySelectorAll("[aria-label]")].find((e) => e.getAttribute("aria-label") === place)?.focus();
    warn("");
  } catch (error) {
    if (mine === turn) warn(error.message === "Failed to fetch" ? "The gateway does not answer." : error.message);
  } finally {
    if (mine === turn) begunAt = -Infinity;
  }
}

function show() {
  const name = view();
  for (const link of document.querySelectorAll("nav a"))
    link.hash === `#${name}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  document.title = `${name.replace("-", " ")} · Penstock`;
  refresh();
}

// Whether something in the view has the focus, is open, is pressed, or is under the mouse. On a touch screen nothing is.
function isBusy() {
  const active = document.activeElement;
  return document.hidden || isPressed || document.querySelector("dialog[open], details[open]")
    || (main.contains(active) && active !== main)
    || (canHover.matches && main.querySelector("button:hover, select:hover, summary:hover, a:hover, input:hover"));
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("penstock-theme", name);
}

theme(localStorage.getItem("penstock-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () =>
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
addEventListener("hashchange", () => { show(); main.focus(); });
addEventListener("pointerdown", () => { isPressed = true; });
for (const ended of ["pointerup", "pointercancel"]) addEventListener(ended, () => { isPressed = false; });
setInterval(() => { if (!isBusy() && !STILL.has(view())) refresh(true); }, LIVE_MS);
show();
