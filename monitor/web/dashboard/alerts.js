// Alerts: cards with broadcast and reference side by side, filters, and keyboard shortcuts for reviews.

import { address, can, get, part, send } from "./api.js";
import { button, el, empty, icon, put, toast } from "./dom.js";
import { Filters, saveCsv } from "./filters.js";
import { ALERTS, on } from "./events.js";
import { Selection } from "./selection.js";
import { clock, length, moment } from "./times.js";

const PAGE = 24;
const NEW_MS = 60000;
export const DECISIONS = [
  ["confirmed", "Confirm", "Confirmed", "c"],
  ["false", "False positive", "False positive", "f"],
  ["licensed", "Licensed", "Licensed by review", "l"],
];
const STATUS = { open: ["On air now", "live"], ended: ["Ended", "idle"], retracted: ["Retracted", "idle"] };

export async function show(root, { query, signal }) {
  const filters = new Filters(query);
  const list = el("div.cards");
  const more = button("Show older", {}, () => load());
  const count = el("p.lead", { role: "status" });
  const cards = new Map();
  const selection = new Selection(cards, DECISIONS);
  let cursor = null,
    loading = false;

  const describe = () => {
    count.textContent = cards.size
      ? `${cards.size}${cursor ? "+" : ""} ${cards.size === 1 ? "alert" : "alerts"}${filters.any ? " matching these filters" : ", newest first"}`
      : "";
    more.hidden = !cursor;
    if (cards.size) list.querySelector(".empty")?.remove();
    else
      put(
        list,
        filters.any
          ? empty("No alert matches these filters", ["Remove a filter to see more."])
          : empty(
              "No alert yet",
              [
                "An alert appears here within seconds after a registered video goes on air.",
                "Nothing registered or monitored yet? Run:",
              ],
              [
                'copywatch refs add film.mp4 --title "The Film"',
                "copywatch channels add channel-5 URL --config copywatch.yaml",
                "copywatch serve --config copywatch.yaml",
              ],
            ),
      );
  };
  const createCard = (alert) => {
    const card = new Card(alert, selection);
    cards.set(alert.id, card);
    pollEvidence(alert, signal, (now) => card.draw(now));
    return card.element;
  };
  const load = async (fresh = false) => {
    if (loading) return;
    loading = true;
    try {
      const page = await get("alerts", { ...filters.api(), limit: PAGE, cursor: fresh ? null : cursor }, signal);
      const focusedId = list.contains(document.activeElement) && document.activeElement.closest(".card")?.dataset.id;
      if (fresh) {
        cards.clear();
        put(list);
        selection.clear();
      }
      for (const alert of page.items) {
        if (!cards.has(alert.id)) list.append(createCard(alert));
      }
      if (fresh) cards.get(focusedId)?.title.focus({ preventScroll: true }); // a reconnection does not move the focus
      cursor = page.next;
      describe();
    } finally {
      loading = false;
    }
  };

  on(
    ALERTS,
    (alert, kind) => {
      const card = cards.get(alert.id);
      if (card) card.draw(alert);
      else if (kind !== "alert.reviewed" && alert.status !== "retracted") {
        if (!filters.matches(alert)) return;
        list.prepend(createCard(alert));
        list.firstElementChild.classList.add("new");
        describe();
      }
    },
    signal,
  );
  on(["reconnected"], () => load(true).catch(() => {}), signal);
  addEventListener("shortcut", (event) => handleShortcut(event.detail, list, cards, selection), { signal });

  const save = button(
    "CSV",
    { iconName: "download", title: "All alerts matching these filters, with times in UTC and in your zone" },
    () => saveCsv(filters),
  );
  put(
    root,
    el(
      "div.head",
      el("div", el("h1", "Alerts"), count),
      el(
        "p.keys-hint.muted",
        el("kbd", "j"),
        el("kbd", "k"),
        " move ",
        el("kbd", "x"),
        " select ",
        el("kbd", "c"),
        el("kbd", "f"),
        el("kbd", "l"),
        " review",
      ),
      save,
    ),
    await filters.form(signal),
    list,
    el("div.row.centre", more),
    selection.bar,
  );
  await load(true);
}

function handleShortcut(key, list, cards, selection) {
  const all = [...list.querySelectorAll(".card")];
  const at = all.findIndex((card) => card.contains(document.activeElement));
  if (key === "j" || key === "k") {
    const next = all[at < 0 ? 0 : Math.max(0, Math.min(all.length - 1, at + (key === "j" ? 1 : -1)))];
    next?.querySelector(".title").focus();
    next?.scrollIntoView({ block: "nearest" });
    return;
  }
  if (!can("write")) return;
  if (key === "x" && at >= 0) selection.toggle(all[at].dataset.id);
  const decision = DECISIONS.find(([, , , letter]) => letter === key)?.[0];
  if (decision && selection.size) selection.review(decision);
  else if (decision && at >= 0) cards.get(all[at].dataset.id).review(decision);
}

class Card {
  constructor(alert, selection) {
    this.title = el("a.title", { href: `#/alerts/${part(alert.id)}` });
    this.checkbox = el("input", {
      type: "checkbox",
      "aria-label": `Select ${alert.title || alert.reference}`,
      title: "Select several to review them together (x)",
      onchange: () => selection.toggle(alert.id),
    });
    this.body = el("div.facts-line");
    this.chips = el("div.chips");
    this.confidence = el("div.confidence");
    this.frames = el("div.pair");
    this.actions = el(
      "div.row.actions",
      can("write") &&
        DECISIONS.map(([decision, label, , letter]) =>
          button(
            label.split(" ")[0],
            {
              kind: "quiet",
              iconName: decision,
              "data-decision": decision,
              title: `${label} (${letter})`,
              "aria-label": label,
            },
            () => this.review(decision),
          ),
        ),
    );
    this.element = el(
      "article.card",
      { data: { id: alert.id } },
      this.frames,
      can("write") && el("label.select-box", this.checkbox),
      el(
        "div.body",
        el("div.row.between.start", el("h2", this.title), this.confidence),
        this.body,
        this.chips,
        this.actions,
      ),
    );
    this.draw(alert);
  }

  draw(alert) {
    this.alert = alert;
    put(this.title, alert.title || alert.reference);
    put(
      this.body,
      el("strong", alert.channel),
      " · ",
      whenOf(alert),
      ` · ${length(alert.channel_end - alert.channel_start)} from ${clock(alert.reference_start)} of the reference`,
      isOtherSpeed(alert) ? ` at ${alert.speed.toFixed(2)}×` : "",
      alert.owner && el("span.muted", ` · ${alert.owner}`),
    );
    put(this.confidence, confidenceMeter(alert));
    put(this.chips, chipsOf(alert));
    this.element.dataset.status = alert.status;
    for (const action of this.actions.children)
      action.setAttribute("aria-pressed", String(action.dataset.decision === alert.review?.decision));
    if (this.hadEvidence !== alert.has_evidence) {
      this.hadEvidence = alert.has_evidence;
      put(this.frames, frame(alert, "air-start.jpg", "On air"), frame(alert, "ref-start.jpg", "Reference"));
    }
  }

  select(isSelected) {
    this.checkbox.checked = isSelected;
    this.element.classList.toggle("selected", isSelected);
  }

  async review(decision) {
    const reviewed = await review(this.alert, decision);
    if (reviewed) this.draw({ ...this.alert, ...reviewed });
  }
}

/** Sends a review and shows the outcome; the alert after it, or null. */
export async function review(alert, decision, note) {
  try {
    const reviewed = await send("POST", `alerts/${part(alert.id)}/review`, note ? { decision, note } : { decision });
    toast(`${alert.title || alert.reference}: ${DECISIONS.find(([name]) => name === decision)[2].toLowerCase()}.`);
    return reviewed;
  } catch (error) {
    toast(error.message, "error");
    return null;
  }
}

/** Polls a new alert a few times until its evidence exists. */
export async function pollEvidence(alert, signal, onFound) {
  if (alert.has_evidence || Date.now() - Date.parse(alert.emitted_at) > NEW_MS) return;
  for (const wait of [1000, 2000, 4000, 8000, 16000]) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    if (signal.aborted) return;
    const now = await get(`alerts/${part(alert.id)}`, {}, signal).catch(() => alert);
    if (now.has_evidence) {
      onFound(now);
      return;
    }
  }
}

/** One picture of the evidence, or a text if there is none. */
export function frame(alert, file, label, note) {
  const figure = el("figure.frame", el("figcaption", label));
  const showPlaceholder = (text) => figure.prepend(el("span.placeholder", text));
  if (!file || !alert.has_evidence) showPlaceholder(note || "No picture yet");
  else {
    const src = address(`alerts/${part(alert.id)}/evidence/${part(file)}`);
    const picture = el("img", {
      src,
      alt: `${label}: ${alert.title || alert.reference}`,
      width: 320,
      height: 180,
      loading: "lazy",
    });
    picture.addEventListener("error", () => {
      picture.remove();
      showPlaceholder(note || "No picture");
    });
    figure.prepend(picture);
  }
  return figure;
}

/** When it started: the time of day, or the position in a recording, which has none. */
export function whenOf(alert, options) {
  return alert.started_at ? moment(alert.started_at, options) : `second ${clock(alert.channel_start)} of the recording`;
}

/** Whether the speed is known and differs from normal by more than its usual error. */
export function isOtherSpeed(alert) {
  return alert.speed !== null && Math.abs(alert.speed - 1) > 0.05;
}

export function chipsOf(alert) {
  const [label, tone] = STATUS[alert.status] ?? [alert.status, "idle"];
  const decision = DECISIONS.find(([name]) => name === alert.review?.decision);
  return [
    el("span.chip", { data: { tone } }, label),
    alert.licence && el("span.chip", { data: { tone: "licensed" } }, icon("licensed"), "Licensed"),
    decision &&
      el("span.chip", { data: { tone: decision[0] }, title: `by ${alert.review.by}` }, icon(decision[0]), decision[2]),
    alert.ambiguous &&
      el(
        "span.chip",
        { data: { tone: "warn" }, title: "The reference shows the same in several places; the alert lists them." },
        "Place uncertain",
      ),
    alert.gaps.length > 0 &&
      el(
        "span.chip",
        { data: { tone: "warn" } },
        `${length(alert.gaps.reduce((sum, gap) => sum + gap.seconds, 0))} missing`,
      ),
  ];
}

/** The chance that the alert is right, as a percentage and a bar; alerts of older versions state none. */
export function confidenceMeter({ confidence }) {
  if (confidence === null || confidence === undefined) return el("span.muted.small", "no confidence stated");
  const percent = `${Math.round(100 * confidence)} %`;
  return [
    el("span.number", { title: `Of alerts that say ${percent}, about ${percent} are right.` }, percent),
    el("meter", { min: 0, max: 1, value: confidence, "aria-label": "confidence" }),
  ];
}
