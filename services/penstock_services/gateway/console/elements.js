// Builds elements. Text is always set as text, so nothing from a run is interpreted as HTML.
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A table. On a phone each row becomes a block, with the titles of the columns before its cells.
export function table(caption, columns, rows) {
  const head = columns.map(([title, kind]) => h("th", { scope: "col", class: kind ?? "" }, title));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, i) => h("td", { class: columns[i][1] ?? "", "data-title": columns[i][0] }, cell))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export const card = (title, ...children) => h("section", { class: "card" }, h("h2", {}, title), children);
export const empty = (text) => h("p", { class: "empty" }, text);
export const number = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–"
  : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en")
    : value !== 0 && Math.abs(value) < 0.001 ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(4))));
export const clock = (milliseconds) => (milliseconds ? new Date(milliseconds).toLocaleString() : "–");

// A form of filters. A field is [name, label, kind]; its kind is a type of input, or a list of [value, title]. `apply` gets
// the values when the form is sent, so that nothing is replaced while somebody types.
export function filters(fields, values, apply, ...more) {
  const control = ([name, label, kind]) => {
    const own = { name, "aria-label": label };
    if (Array.isArray(kind)) return h("select", own, kind.map(([value, title]) => h("option", { value, selected: value === (values[name] ?? "") }, title)));
    return h("input", { ...own, type: kind, value: values[name] ?? "", ...(kind === "number" ? { step: "any", class: "short" } : {}) });
  };
  const send = (event) => {
    event.preventDefault();
    apply(Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, value.trim()])));
  };
  return h("form", { class: "filters", onsubmit: send },
    fields.map((each) => h("label", {}, `${each[1]} `, control(each))), h("button", { type: "submit" }, "Apply"), more);
}

// The prompt, what is right, and where it fits on the page, a response next to them.
export const texts = (...entries) => h("div", { class: "texts" }, entries.map(([title, text]) =>
  h("section", { "aria-label": title }, h("h4", {}, title), h("pre", {}, text === "" ? "–" : text))));
export const truth = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value, null, 1));

export function say(text) {
  document.getElementById("announcement").textContent = text;
}

export function warn(text) {
  const notice = document.getElementById("notice");
  notice.hidden = !text;
  if (notice.textContent !== text) notice.textContent = text;
}

export function confirmed(title, text, verb) {
  const dialog = document.getElementById("confirm-dialog");
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  document.getElementById("confirm-yes").textContent = verb;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
