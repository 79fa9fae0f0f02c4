// The frame around the pages: routing, header, keyboard shortcuts and announcements.
//
// A page is a function (root, {id, query, signal}); the signal aborts its listeners when another page is shown.

import * as alert from "./alert.js";
import * as alerts from "./alerts.js";
import { all, loadSession, logInByLink, send, session } from "./api.js";
import * as channels from "./channels.js";
import { el, icon, put } from "./dom.js";
import * as licences from "./licences.js";
import { ALERTS, listen, on } from "./events.js";
import * as references from "./references.js";
import * as system from "./system.js";
import { timeOf, ZONE, zoneName } from "./times.js";

const PAGES = {
  live: ["Live", channels.show],
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
  ["x", "select the alert; then c, f and l apply to all selected alerts"],
  ["e", "export the open alert as a zip file"],
  ["Arrow keys", "move through the cells of the similarity matrix"],
  ["?", "this list"],
];

const main = document.getElementById("main");
let pageAbort = new AbortController();
let openAlerts = new Set();
let title = "Copywatch";

/** "#/alerts/ab12?x=1" -> page, id, query. */
function parseHash() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, id] = path.split("/");
  const page = name === "alerts" && id ? "alert" : name in PAGES && name !== "alert" ? name : "live";
  return { page, id: id ? decodeURIComponent(id) : null, query: new URLSearchParams(query) };
}

async function showPage({ focus = true } = {}) {
  pageAbort.abort();
  pageAbort = new AbortController();
  const { page, id, query } = parseHash();
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
  const { signal } = pageAbort;
  try {
    await show(root, { id, query, signal });
    root.dataset.shown = "";
  } catch (error) {
    // The part that was already drawn stays.
    if (!signal.aborted)
      root.append(
        el("section.empty", { role: "alert" }, el("h2", "This page cannot be shown"), el("p", error.message)),
      );
  }
}

function showCount() {
  const count = document.getElementById("open-count");
  count.hidden = openAlerts.size === 0;
  put(count, String(openAlerts.size), el("span.visually-hidden", " on air"));
  document.title = openAlerts.size ? `(${openAlerts.size}) ${title}` : title;
}

/** Counts open alerts, and announces new ones to screen readers. */
async function watchAlerts() {
  const load = async () => {
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
  on(["reconnected"], load);
  await load();
}

function watchConnection() {
  const mark = document.getElementById("connection"),
    banner = document.getElementById("banner");
  on(["state"], ({ up, since }) => {
    mark.dataset.state = up ? "up" : "lost";
    document.getElementById("connection-text").textContent = up ? "Live" : "Lost";
    banner.hidden = up;
    banner.textContent = up
      ? ""
      : `Connection lost since ${timeOf(since)} (${ZONE}). This page shows the state of that time; reconnecting.`;
  });
}

function watchTheme() {
  const toggle = document.getElementById("theme"),
    root = document.documentElement;
  const systemTheme = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemTheme.matches);
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
      // storage may be forbidden: the choice lasts until the page is left
    }
    draw();
  });
  systemTheme.addEventListener("change", draw);
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
        KEYS.map(([key, action]) => [el("dt", el("kbd", key)), el("dd", action)]),
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
  let goPressedAt = 0;
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest?.("input:not([type=checkbox]), select, textarea")) return;
    if (event.key === "?") showKeys();
    else if (Date.now() - goPressedAt < 3000 && event.key in pages) location.hash = `#/${pages[event.key]}`;
    else if (event.key === "g") {
      goPressedAt = Date.now();
      return;
    } else {
      dispatchEvent(new CustomEvent("shortcut", { detail: event.key }));
      return;
    }
    goPressedAt = 0;
    event.preventDefault();
  });
  document.getElementById("keys").addEventListener("click", showKeys);
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address names the page
    main.focus();
  });
}

function showSession() {
  const logOut = document.getElementById("log-out");
  logOut.hidden = false;
  logOut.textContent = "Log out";
  logOut.title = `Logged in as ${session.name}; scopes: ${session.scopes.join(", ")}`;
  logOut.addEventListener("click", async () => {
    await send("DELETE", "session");
    location.reload();
  });
}

async function start() {
  const zone = document.getElementById("zone");
  zone.textContent = zoneName();
  zone.title = "All times are in this zone; hover over a time to see it in UTC.";
  watchTheme();
  watchConnection();
  watchKeys();
  try {
    await logInByLink();
    await loadSession();
  } catch (error) {
    put(main, el("section.empty", el("h2", "The server does not respond"), el("p", error.message)));
    setTimeout(start, 5000);
    return;
  }
  showSession();
  addEventListener("hashchange", () => showPage());
  await listen();
  showPage({ focus: false });
  watchAlerts();
}

addEventListener("hashchange", async () => {
  if (await logInByLink()) location.reload(); // the printed link was opened in a page that waits for a login
});
start();
