// The frame around the pages: which page is shown, the header, the keyboard, and what is announced.
//
// A page is a function (root, {id, query, signal}); it listens with the signal, which ends when another page is shown.

import * as alert from "./alert.js";
import * as alerts from "./alerts.js";
import { all, begin, can, send, session } from "./api.js";
import { el, icon, put } from "./dom.js";
import * as licences from "./licences.js";
import { ALERTS, listen, on } from "./live.js";
import * as references from "./references.js";
import * as system from "./system.js";
import { timeOf, ZONE, zoneName } from "./times.js";
import * as wall from "./wall.js";

const PAGES = {
  live: ["Live", wall.show],
  alerts: ["Alerts", alerts.show],
  alert: ["Alert", alert.show],
  references: ["References", references.show],
  licences: ["Licences", licences.show],
  system: ["System", system.show],
};
const KEYS = [
  ["g then l, a, r, c, s", "go to live, alerts, references, licences, system"],
  ["j, k", "next and previous alert"],
  ["Enter", "open the alert"],
  ["c", "confirm: it is a copy"],
  ["f", "false positive"],
  ["l", "licensed"],
  ["x", "choose the alert; then c, f and l are for all that are chosen"],
  ["e", "export the alert that is open, as a zip"],
  ["Arrow keys", "move the cell in the similarity matrix"],
  ["?", "this list"],
];

const main = document.getElementById("main");
let leaving = new AbortController();
let openAlerts = new Set();
let title = "Copywatch";

/** "#/alerts/ab12?x=1" -> page, id, query. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  const page = name === "alerts" && id ? "alert" : name in PAGES && name !== "alert" ? name : "live";
  return { page, id: id ? decodeURIComponent(id) : null, query: new URLSearchParams(query) };
}

async function go({ focus = true } = {}) {
  leaving.abort();
  leaving = new AbortController();
  const { page, id, query } = place();
  const [name, show] = PAGES[page];
  for (const link of document.querySelectorAll(".tabs a")) {
    const here = link.dataset.page === page || (page === "alert" && link.dataset.page === "alerts");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  title = `${name} · Copywatch`;
  showCount();
  const root = el("div.page", { data: { page } });
  put(main, root);
  window.scrollTo(0, 0);
  if (focus) main.focus({ preventScroll: true });
  const { signal } = leaving;
  try {
    await show(root, { id, query, signal });
    root.dataset.shown = "";
  } catch (error) {
    // What could be shown stays.
    if (!signal.aborted)
      root.append(el("section.empty", { role: "alert" }, el("h2", "This cannot be shown"), el("p", error.message)));
  }
}

function showCount() {
  const count = document.getElementById("open-count");
  count.hidden = openAlerts.size === 0;
  put(count, String(openAlerts.size), el("span.unseen", " on air"));
  document.title = openAlerts.size ? `(${openAlerts.size}) ${title}` : title;
}

/** The count of open alerts, and the words for who cannot see them appear. */
async function watchAlerts() {
  const ask = async () => {
    try {
      openAlerts = new Set((await all("alerts", { status: "open" })).map((one) => one.id));
      showCount();
    } catch {
      // the banner says that the connection is lost
    }
  };
  on(ALERTS, (one, kind) => {
    if (one.status === "open") openAlerts.add(one.id);
    else openAlerts.delete(one.id);
    showCount();
    if (kind === "alert.started") {
      document.getElementById("announcements").textContent =
        `New alert: ${one.title || one.reference} on ${one.channel}`;
    }
  });
  on(["again"], ask);
  await ask();
}

function watchConnection() {
  const mark = document.getElementById("connection"),
    banner = document.getElementById("banner");
  on(["state"], ({ up, since }) => {
    mark.dataset.state = up ? "up" : "lost";
    document.getElementById("connection-words").textContent = up ? "Live" : "Lost";
    banner.hidden = up;
    banner.textContent = up
      ? ""
      : `The connection is lost since ${timeOf(since)} (${ZONE}). What you see is from then; trying again.`;
  });
}

function watchTheme() {
  const toggle = document.getElementById("theme"),
    root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const draw = () => {
    put(toggle, icon(isDark() ? "sun" : "moon"));
    toggle.setAttribute("aria-label", isDark() ? "Light colours" : "Dark colours");
    toggle.title = toggle.getAttribute("aria-label");
    dispatchEvent(new Event("theme"));
  };
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch {
      // storage may be forbidden: the choice holds until the page is left
    }
    draw();
  });
  system.addEventListener("change", draw);
  draw();
}

function showKeys() {
  const dialog = el(
    "dialog.dialog",
    { "aria-labelledby": "keys-title" },
    el(
      "form",
      { method: "dialog" },
      el("h2", { id: "keys-title" }, "Keyboard"),
      el(
        "dl.keys",
        KEYS.map(([key, what]) => [el("dt", el("kbd", key)), el("dd", what)]),
      ),
      el("div.row.end", el("button.button.primary", { autofocus: true }, "Close")),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function watchKeys() {
  const pages = { l: "live", a: "alerts", r: "references", c: "licences", s: "system" };
  let going = 0;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest?.("input:not([type=checkbox]), select, textarea")) return;
    if (event.key === "?") showKeys();
    else if (Date.now() - going < 3000 && event.key in pages) location.hash = `#/${pages[event.key]}`;
    else if (event.key === "g") {
      going = Date.now();
      return;
    } else {
      dispatchEvent(new CustomEvent("shortcut", { detail: event.key }));
      return;
    }
    going = 0;
    event.preventDefault();
  });
  document.getElementById("keys").addEventListener("click", showKeys);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address names the page
    main.focus();
  });
}

function showSession() {
  const who = document.getElementById("who");
  who.hidden = session.name === "this machine"; // no token was needed
  who.textContent = "Log out";
  who.title = `You are ${session.name}, who may ${can("admin") ? "do everything" : can("write") ? "read and write" : "read"}`;
  who.addEventListener("click", async () => {
    await send("DELETE", "session");
    location.reload();
  });
}

async function start() {
  const zone = document.getElementById("zone");
  zone.textContent = zoneName();
  zone.title = "All times are shown in this zone; hold the pointer over one to see it in UTC.";
  watchTheme();
  watchConnection();
  watchKeys();
  try {
    await begin();
  } catch (error) {
    put(main, el("section.empty", el("h2", "The server does not answer"), el("p", error.message)));
    setTimeout(start, 5000);
    return;
  }
  showSession();
  addEventListener("hashchange", () => go());
  await listen();
  go({ focus: false });
  watchAlerts();
}

start();
