// A row of tokens, each with a kind (its colour) and its description. Left and right arrows move.
import { h, say } from "/console/elements.js";

export const NUM_COLOURS = 6;

function walk(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || event.target.parentElement !== event.currentTarget) return;
  const next = step > 0 ? event.target.nextElementSibling : event.target.previousElementSibling;
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
  say(next.getAttribute("aria-label"));
}

export const rowOf = (spans) => h("div", { class: "tokens", role: "group", "aria-label": "tokens; left and right arrows move", onkeydown: walk }, spans);

export const tokenRow = (tokens) => rowOf(tokens.map(({ text, kind, description }, index) =>
  h("span", { title: description, tabindex: index ? "-1" : "0", class: kind, "aria-label": `${text} ${description}` }, text)));
