// Line charts as SVG. Each shows one series and offers its numbers as a table for those who cannot see the chart.
import { h, number, table } from "/console/elements.js";

const WIDTH = 400, HEIGHT = 150, LEFT = 44, RIGHT = 10, TOP = 10, BOTTOM = 22;

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const STEPS = [1, 2, 3, 4, 5, 6, 8, 10];

// Round up to a number with one digit, which is easy to read on an axis.
function rounded(value) {
  if (value <= 0) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * STEPS.find((step) => step * unit >= value * (1 - 1e-9));
}

function scales(points) {
  const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [0 - rounded(-Math.min(0, ...ys)), rounded(Math.max(0, ...ys))];
  if (y0 === y1) y1 = y0 + 1;
  return {
    x: (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM),
    x0, x1, y0, y1,
  };
}

function draw(points, title, label) {
  const s = scales(points);
  const ticks = [s.y0, (s.y0 + s.y1) / 2, s.y1].flatMap((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: s.y(value), y2: s.y(value) }),
    svg("text", { x: LEFT - 6, y: s.y(value) + 4, "text-anchor": "end" }, number(value)),
  ]);
  const path = points.map((p, i) => `${i ? "L" : "M"}${s.x(p.x).toFixed(1)} ${s.y(p.y).toFixed(1)}`).join("");
  const last = points.at(-1);
  const rule = svg("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const mark = svg("circle", { class: "mark", r: 4, cx: s.x(last.x), cy: s.y(last.y) });
  const first = points[0], middle = `${title}: ${points.length} points, from ${number(first.y)} to ${number(last.y)}`;
  const picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": middle },
    ...ticks,
    svg("text", { x: LEFT, y: HEIGHT - 5 }, label(s.x0)),
    svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, label(s.x1)),
    svg("path", { class: "series", d: path }), rule, mark);
  return { picture, rule, mark, s };
}

export function lineChart(title, points, label = (x) => `step ${x}`) {
  const known = points.filter((p) => Number.isFinite(p.y));
  const shown = h("b", {}, known.length ? number(known.at(-1).y) : "–");
  const head = h("div", { class: "chart-head" }, h("h3", {}, title), shown);
  if (!known.length) return h("section", { class: "card" }, head, h("p", { class: "empty" }, "Nothing yet."));
  const { picture, rule, mark, s } = draw(known, title, label);
  const show = (point) => {
    shown.textContent = point === known.at(-1) ? number(point.y) : `${number(point.y)} · ${label(point.x)}`;
    for (const name of ["x1", "x2"]) rule.setAttribute(name, s.x(point.x));
    rule.setAttribute("visibility", point === known.at(-1) ? "hidden" : "visible");
    mark.setAttribute("cx", s.x(point.x));
    mark.setAttribute("cy", s.y(point.y));
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    show(known.reduce((best, p) => (Math.abs(s.x(p.x) - x) < Math.abs(s.x(best.x) - x) ? p : best)));
  });
  picture.addEventListener("pointerleave", () => show(known.at(-1)));
  const rows = known.slice(-20).map((p) => [label(p.x), number(p.y)]);
  const numbers = h("details", {}, h("summary", {}, "Numbers"), table(title, [["when"], [title, "number"]], rows));
  return h("section", { class: "card" }, head, picture, numbers);
}
