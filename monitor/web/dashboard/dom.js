// Creates elements. Every string becomes a text node, so text from the API can never become markup; the server's
// Content-Security-Policy (trusted types) refuses anything else.

const SVG = "http://www.w3.org/2000/svg";

/** el("div.card", {title: "…"}, child, [more]); attributes are optional. Attributes named on… are event listeners. */
export function el(selector, ...rest) {
  const [name, ...classes] = selector.split(".");
  return fill(document.createElement(name), classes, rest);
}

/** Like `el`, for SVG. */
export function svg(selector, ...rest) {
  const [name, ...classes] = selector.split(".");
  return fill(document.createElementNS(SVG, name), classes, rest);
}

function fill(element, classes, rest) {
  if (classes.length) element.classList.add(...classes);
  const attributes = rest.length && rest[0]?.constructor === Object ? rest.shift() : {};
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.classList.add(...value.split(" ").filter(Boolean));
    else if (key === "data") Object.assign(element.dataset, value);
    else if (key === "value") element.value = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  add(element, rest);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Replaces the content of the element. */
export function put(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

const ICONS = {
  confirmed: "M4 12.5 9.5 18 20 6.5",
  false: "M6 6 18 18M18 6 6 18",
  licensed: "M12 3 19 6v5c0 5-3 8-7 10-4-2-7-5-7-10V6zM9 11.5l2.2 2.2L15 10",
  download: "M12 4v11m-4.5-4.5L12 15l4.5-4.5M5 20h14",
  upload: "M12 16V5M7.5 9.5 12 5l4.5 4.5M5 20h14",
  plus: "M12 5v14M5 12h14",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8ZM12 2v2m0 16v2M4.9 4.9l1.4 1.4m11.4 11.4 1.4 1.4M2 12h2m16 0h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5Z",
  warning: "M12 4 2.8 20h18.4zM12 10v4.5m0 2.5v.2",
  trash: "M5 7h14M10 7V4h4v3m-7 0 1 13h8l1-13",
  back: "M14 6 8 12l6 6",
};

/** An icon beside a text, never alone. */
export function icon(name) {
  return svg("svg.icon", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** A button with a label and an optional icon. */
export function button(label, options, onclick) {
  const { kind, iconName, ...attributes } = options;
  const element = el(
    "button.button",
    { type: "button", ...attributes, onclick },
    iconName && icon(iconName),
    el("span", label),
  );
  if (kind) element.classList.add(kind);
  return element;
}

/** A labelled field of a form. */
export function field(label, input, hint) {
  return el("label.field", el("span.label", label), input, hint && el("span.hint", hint));
}

export function select(name, choices, selected, attributes = {}) {
  const options = choices.map(([value, label]) => el("option", { value, selected: value === (selected ?? "") }, label));
  return el("select", { name, ...attributes }, options);
}

/** The text of an empty list: a heading, sentences, and commands to run. */
export function empty(title, sentences, commands = []) {
  return el(
    "section.empty",
    el("h2", title),
    sentences.map((sentence) => el("p", sentence)),
    commands.length > 0 && el("pre.commands", el("code", commands.join("\n"))),
  );
}

/** A table that becomes cards on a narrow page; a column without a name holds buttons. */
export function table(names, rows) {
  const cell = (content, n) => (names[n] ? el("td", { data: { label: names[n] } }, content) : el("td.end", content));
  return el(
    "div.scroll",
    el(
      "table",
      el(
        "thead",
        el(
          "tr",
          names.map((name) => el("th", { scope: "col" }, name)),
        ),
      ),
      el(
        "tbody",
        rows.map((cells) => el("tr", cells.map(cell))),
      ),
    ),
  );
}

let toastRoot;

/** A message that disappears after some seconds; errors stay longer. */
export function toast(sentence, kind = "note") {
  toastRoot ??= document.getElementById("toasts");
  const message = el("p.toast", { data: { kind } }, sentence);
  toastRoot.append(message);
  setTimeout(() => message.remove(), kind === "error" ? 12000 : 5000);
}

/** A question in a dialog; resolves to whether the answer was yes. */
export function askToConfirm(title, sentence, yes) {
  return new Promise((resolve) => {
    const dialog = el(
      "dialog.dialog",
      { "aria-labelledby": "question" },
      el(
        "form",
        { method: "dialog" },
        el("h2", { id: "question" }, title),
        el("p", sentence),
        el(
          "div.row.end",
          el("button.button", { value: "no", autofocus: true }, "Cancel"),
          el("button.button.danger", { value: "yes" }, yes),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** A form in a dialog. `send(values)` may throw: the error is shown and the dialog stays open. */
export function formDialog(title, intro, fields, sendLabel, send) {
  const problem = el("p.problem", { role: "alert", hidden: true });
  const form = el(
    "form",
    { class: "stack" },
    el("h2", { id: "form-title" }, title),
    intro && el("p.muted", intro),
    fields,
    problem,
    el(
      "div.row.end",
      el("button.button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      el("button.button.primary", { type: "submit" }, sendLabel),
    ),
  );
  const dialog = el("dialog.dialog", { "aria-labelledby": "form-title" }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    problem.hidden = true;
    try {
      await send(Object.fromEntries(new FormData(form)));
      dialog.close();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
