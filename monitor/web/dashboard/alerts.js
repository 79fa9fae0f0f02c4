// Alerts: cards with the air and the reference side by side, filters, and a keyboard to review them by.

import { address, can, get, part, send } from "./api.js";
import { button, el, empty, icon, put, toast } from "./dom.js";
import { Filters, saveCsv } from "./filters.js";
import { ALERTS, on } from "./live.js";
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
      ? `${cards.size}${cursor ? "+" : ""} ${cards.size === 1 ? "alert" : "alerts"}${filters.any ? " by these filters" : ", the newest first"}`
      : "";
    more.hidden = !cursor;
    if (cards.size) list.querySelector(".empty")?.remove();
    else
      put(
        list,
        filters.any
          ? empty("No alert fits these filters", ["Take one away to see more."])
          : empty(
              "No alert yet",
              [
                "An alert appears here by itself within seconds of a registered video going on air.",
                "Nothing registered or watched yet? This is all it takes:",
              ],
              [
                'copywatch refs add film.mp4 --title "The Film"',
                "copywatch channels add channel-5 URL --config copywatch.yaml",
                "copywatch serve --config copywatch.yaml",
              ],
            ),
      );
  };
  const make = (alert) => {
    const card = new Card(alert, selection);
    cards.set(alert.id, card);
    untilEvidence(alert, signal, (now) => card.draw(now));
    return card.element;
  };
  const load = async (fresh = false) => {
    if (loading) return;
    loading = true;
    try {
      const page = await get("alerts", { ...filters.api(), limit: PAGE, cursor: fresh ? null : cursor }, signal);
      const held = list.contains(document.activeElement) && document.activeElement.closest(".card")?.dataset.id;
      if (fresh) {
        cards.clear();
        put(list);
        selection.clear();
      }
      for (const alert of page.items) {
        if (!cards.has(alert.id)) list.append(make(alert));
      }
      if (fresh) cards.get(held)?.title.focus({ preventScroll: true }); // a connection that came back disturbs nobody
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
        if (!filters.fits(alert)) return;
        list.prepend(make(alert));
        list.firstElementChild.classList.add("new");
        describe();
      }
    },
    signal,
  );
  on(["again"], () => load(true).catch(() => {}), signal);
  addEventListener("shortcut", (event) => shortcut(event.detail, list, cards, selection), { signal });

  const save = button(
    "CSV",
    { sign: "download", title: "All alerts by these filters, times in UTC and in your zone" },
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
        " choose ",
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

function shortcut(key, list, cards, selection) {
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
    this.choice = el("input", {
      type: "checkbox",
      "aria-label": `Choose ${alert.title || alert.reference}`,
      title: "Choose several to review them at once (x)",
      onchange: () => selection.toggle(alert.id),
    });
    this.body = el("div.facts-line");
    this.chips = el("div.chips");
    this.score = el("div.score");
    this.frames = el("div.pair");
    this.actions = el(
      "div.row.actions",
      can("write") &&
        DECISIONS.map(([decision, words, , letter]) =>
          button(
            words.split(" ")[0],
            {
              kind: "quiet",
              sign: decision,
              "data-decision": decision,
              title: `${words} (${letter})`,
              "aria-label": words,
            },
            () => this.review(decision),
          ),
        ),
    );
    this.element = el(
      "article.card",
      { data: { id: alert.id } },
      this.frames,
      can("write") && el("label.choice", this.choice),
      el(
        "div.body",
        el("div.row.between.start", el("h2", this.title), this.score),
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
      ` · ${length(alert.channel_end - alert.channel_start)} of it, from `,
      clock(alert.reference_start),
      Math.abs(alert.speed - 1) > 0.05 ? ` at ${alert.speed.toFixed(2)}×` : "",
      alert.owner && el("span.muted", ` · ${alert.owner}`),
    );
    put(this.score, scoreMeter(alert.score));
    put(this.chips, chipsOf(alert));
    this.element.dataset.status = alert.status;
    for (const each of this.actions.children)
      each.setAttribute("aria-pressed", String(each.dataset.decision === alert.review?.decision));
    if (this.hadEvidence !== alert.has_evidence) {
      this.hadEvidence = alert.has_evidence;
      put(this.frames, frame(alert, "air-start.jpg", "On air"), frame(alert, "ref-start.jpg", "Reference"));
    }
  }

  choose(isChosen) {
    this.choice.checked = isChosen;
    this.element.classList.toggle("chosen", isChosen);
  }

  async review(decision) {
    const reviewed = await review(this.alert, decision);
    if (reviewed) this.draw({ ...this.alert, ...reviewed });
  }
}

/** The alert after the review, or null; what was done is said. */
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

/** Asks again, a few times, for an alert that is so new that its pictures are still being made. */
export async function untilEvidence(alert, signal, found) {
  if (alert.has_evidence || Date.now() - Date.parse(alert.emitted_at) > NEW_MS) return;
  for (const wait of [1000, 2000, 4000, 8000, 16000]) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    if (signal.aborted) return;
    const now = await get(`alerts/${part(alert.id)}`, {}, signal).catch(() => alert);
    if (now.has_evidence) return void found(now);
  }
}

/** One picture of the evidence, or words where there is none. */
export function frame(alert, file, label, words) {
  const figure = el("figure.frame", el("figcaption", label));
  const without = (sentence) => figure.prepend(el("span.without", sentence));
  if (!file || !alert.has_evidence) without(words || "No picture yet");
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
      without(words || "No picture");
    });
    figure.prepend(picture);
  }
  return figure;
}

/** When it began: on the wall clock, or in a recording, which has none. */
export function whenOf(alert, options) {
  return alert.started_at ? moment(alert.started_at, options) : `second ${clock(alert.channel_start)} of the recording`;
}

export function chipsOf(alert) {
  const [words, tone] = STATUS[alert.status] ?? [alert.status, "idle"];
  const decision = DECISIONS.find(([name]) => name === alert.review?.decision);
  return [
    el("span.chip", { data: { tone } }, words),
    alert.licence && el("span.chip", { data: { tone: "licensed" } }, icon("licensed"), "Licensed"),
    decision &&
      el("span.chip", { data: { tone: decision[0] }, title: `by ${alert.review.by}` }, icon(decision[0]), decision[2]),
    alert.gaps.length > 0 &&
      el(
        "span.chip",
        { data: { tone: "warn" } },
        `${length(alert.gaps.reduce((sum, gap) => sum + gap.seconds, 0))} not seen`,
      ),
  ];
}

export function scoreMeter(score) {
  return [el("span.number", score.toFixed(2)), el("meter", { min: 0, max: 1, value: score, "aria-label": "score" })];
}
