// One alert: what aired beside what was registered, both time lines, the matrix that explains it, and the verdict.

import { ask, can, get, part, send } from "./api.js";
import { chipsOf, DECISIONS, frame, review, scoreMeter, untilEvidence, whenOf } from "./alerts.js";
import { button, confirmed, el, field, formDialog, icon, put, toast } from "./dom.js";
import { licenceFields, licenceOf } from "./licences.js";
import { ALERTS, on } from "./live.js";
import { matrixView } from "./matrix.js";
import { timeLines } from "./timelines.js";
import { clock, length, moment, ZONE } from "./times.js";

const EVENTS = {
  "alert.started": "Told: a copy is on air",
  "alert.updated": "Told again: it goes on",
  "alert.ended": "Ended",
  "alert.retracted": "Retracted",
  "alert.reviewed": "Reviewed",
};
const PLACES = { start: "Start", middle: "Middle", end: "End" };

export async function show(root, { id, signal }) {
  let alert = await get(`alerts/${part(id)}`, {}, signal);
  const parts = {
    head: el("div"),
    verdict: el("section.panel.verdict"),
    frames: el("section.panel.pictures"),
    lines: el("section.panel"),
    matrix: el("section.panel"),
    numbers: el("section.panel"),
    events: el("section.panel"),
    more: el("section.panel"),
  };
  put(
    root,
    el("p.crumb", el("a", { href: "#/alerts" }, icon("back"), "Alerts")),
    parts.head,
    el(
      "div.detail",
      el("div.stack", parts.frames, parts.lines, parts.matrix),
      el(
        "aside.stack",
        { "aria-label": "Verdict and numbers" },
        parts.verdict,
        parts.numbers,
        parts.more,
        parts.events,
      ),
    ),
  );

  const draw = () => {
    put(
      parts.head,
      el(
        "div.head",
        el(
          "div",
          el("h1", alert.title || alert.reference),
          el(
            "p.lead",
            "On ",
            el("strong", alert.channel),
            " since ",
            whenOf(alert, { full: true }),
            `, ${length(alert.channel_end - alert.channel_start)} from `,
            clock(alert.reference_start),
            " of the reference",
            Math.abs(alert.speed - 1) > 0.05 ? `, at ${alert.speed.toFixed(2)} times its speed` : "",
            ".",
          ),
        ),
        el("div.chips", chipsOf(alert)),
      ),
    );
    drawVerdict(parts.verdict, alert, (reviewed) => {
      alert = { ...alert, ...reviewed };
      draw();
    });
    timeLines(parts.lines, alert, signal);
    drawNumbers(parts.numbers, alert);
    drawMore(parts.more, alert);
    drawEvents(parts.events, alert);
  };
  const drawEvidence = async () => {
    let evidence = null,
      sentence = "Evidence is made while the copy is on air; it appears here by itself.";
    try {
      if (alert.has_evidence) evidence = await get(`alerts/${part(id)}/evidence`, {}, signal);
    } catch (error) {
      sentence = error.message;
    }
    drawFrames(parts.frames, alert, evidence, sentence);
    // Who reads cells of a copy that is on air is not disturbed by newer ones.
    if (!parts.matrix.contains(document.activeElement)) matrixView(parts.matrix, alert, evidence, sentence, signal);
  };
  const again = async () => {
    const before = `${alert.has_evidence} ${alert.status} ${alert.seq}`;
    alert = await get(`alerts/${part(id)}`, {}, signal);
    draw();
    if (before !== `${alert.has_evidence} ${alert.status} ${alert.seq}`) await drawEvidence();
  };
  on(ALERTS, (told) => told.id === id && again().catch(() => {}), signal);
  on(["again"], () => again().catch(() => {}), signal);
  addEventListener(
    "shortcut",
    async (event) => {
      if (event.detail === "e") save(alert);
      const decision = DECISIONS.find(([, , , letter]) => letter === event.detail)?.[0];
      if (!decision || !can("write")) return;
      const reviewed = await review(alert, decision);
      if (reviewed) {
        alert = { ...alert, ...reviewed };
        draw();
      }
    },
    { signal },
  );
  draw();
  await drawEvidence();
  untilEvidence(alert, signal, () => again().catch(() => {}));
}

function drawVerdict(panel, alert, done) {
  const before = panel.querySelector("input[name=note]"); // somebody may be writing while the copy goes on
  const note = before ?? el("input", { name: "note", maxlength: 500, placeholder: "a word for your colleagues" });
  const isWriting = before !== null && before === document.activeElement;
  const decide = async (decision) => {
    const reviewed = await review(alert, decision, note.value.trim());
    if (reviewed) {
      note.value = "";
      done(reviewed);
    }
  };
  put(
    panel,
    el("h2", "Review"),
    alert.review
      ? el(
          "p",
          el("strong", DECISIONS.find(([name]) => name === alert.review.decision)?.[2] ?? alert.review.decision),
          ` by ${alert.review.by}, `,
          moment(alert.review.at, { full: true }),
          alert.review.note && el("span.muted", ` – ${alert.review.note}`),
        )
      : el("p.muted", "Nobody has looked at it yet."),
    can("write")
      ? [
          el(
            "div.row.wrap",
            DECISIONS.map(([decision, words, , letter]) =>
              button(
                words,
                {
                  sign: decision,
                  kind: decision,
                  "data-decision": decision,
                  "aria-pressed": String(alert.review?.decision === decision),
                  title: `${words} (${letter})`,
                },
                () => decide(decision),
              ),
            ),
          ),
          field("Note", note),
        ]
      : el("p.hint", "Your token may only read."),
    alert.reason && el("p", el("span.muted", "Why it ended: "), alert.reason),
    el(
      "p.row.wrap",
      button("Export as zip", { sign: "download", title: "Pictures, numbers and a manifest of SHA-256 sums" }, () =>
        save(alert),
      ),
    ),
  );
  if (isWriting) note.focus();
}

/** Fetches the zip, so that a login or an error is told here, and saves it. */
async function save(alert) {
  try {
    const reply = await ask(`alerts/${part(alert.id)}/export`, { query: { time_zone: ZONE } });
    const url = URL.createObjectURL(await reply.blob());
    el("a", { href: url, download: `alert-${alert.id}.zip` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    toast(error.message, "error");
  }
}

function drawFrames(panel, alert, evidence, sentence) {
  const frames = evidence?.frames ?? [];
  put(
    panel,
    el("h2", "Frames"),
    !frames.length && el("p.muted", sentence),
    evidence?.note && el("p.muted", `Note: ${evidence.note}.`),
    el(
      "div.frames",
      frames.map((one) =>
        el(
          "div.frame-pair",
          el("h3", PLACES[one.at] ?? one.at),
          el(
            "div.pair",
            frame(alert, one.air, `On air ${clock(one.stream_s)}`, one.air ? null : one.note),
            frame(
              alert,
              one.reference,
              one.ref_s === null ? "Reference" : `Reference ${clock(one.ref_s)}`,
              one.reference ? null : one.note,
            ),
          ),
        ),
      ),
    ),
  );
}

function drawNumbers(panel, alert) {
  const percent = (share) => `${Math.round(100 * share)} %`;
  const rows = [
    [
      "Score",
      el("span.inline-score", scoreMeter(alert.score)),
      "Mean of similarity times mask over the aligned seconds, held down for short copies; 0 to 1.",
    ],
    [
      "Coverage of the air",
      percent(alert.coverage_channel),
      "Share of the seconds between start and end on air that were matched.",
    ],
    [
      "Coverage of the reference",
      percent(alert.coverage_reference),
      "Share of the whole reference that lies between its start and end here.",
    ],
    ["Matched", length(alert.matched_seconds), "Seconds of air that lie on the alignment."],
    ["Speed", `${alert.speed.toFixed(2)}×`, "Seconds of the reference for each second of air."],
    [
      "Told after",
      length(alert.detected_at - alert.channel_start),
      "From the copy's first second on air to the second that decided it.",
    ],
    [
      "Not seen",
      alert.gaps.length
        ? alert.gaps.map((gap) => `${length(gap.seconds)} at ${clock(gap.at)} (${gap.reason})`).join(", ")
        : "nothing is missing",
      "Seconds within it, or just before it, that nobody saw.",
    ],
  ];
  if (alert.pauses?.length)
    rows.push([
      "Pauses",
      alert.pauses.map((pause) => `${length(pause.seconds)} at ${clock(pause.at)}`).join(", "),
      "Seconds that were seen and show something else.",
    ]);
  put(
    panel,
    el("h2", "Numbers"),
    el(
      "dl.numbers",
      rows.map(([name, value, meaning]) => el("div", el("dt", name), el("dd", value), el("dd.hint", meaning))),
    ),
    alert.continues &&
      el("p", el("a", { href: `#/alerts/${part(alert.continues)}` }, "It goes on where another alert stopped.")),
    el("p.hint", `Model ${alert.model} · alert ${alert.id}`),
  );
}

/** The life of the alert: what was told and what people said, in order. */
function drawEvents(panel, alert) {
  const told = (alert.events ?? []).map(({ emitted_at, type, score }) => [
    emitted_at,
    EVENTS[type] ?? type,
    score !== null && score !== undefined && ` · score ${score.toFixed(2)}`,
  ]);
  const said = (alert.reviews ?? []).map(({ at, by, decision, note }) => [
    at,
    DECISIONS.find(([name]) => name === decision)?.[2] ?? decision,
    ` · by ${by}${note ? `: ${note}` : ""}`,
  ]);
  const all = [...told, ...said].sort(([one], [other]) => Date.parse(one) - Date.parse(other));
  put(
    panel,
    el("h2", "What was told and said"),
    el(
      "ol.log",
      all.map(([at, what, more]) => el("li", moment(at), " ", el("strong", what), more && el("span.muted", more))),
    ),
  );
}

function drawMore(panel, alert) {
  put(
    panel,
    el("h2", "Rights"),
    el(
      "p",
      alert.licence
        ? ["Licensed by ", el("strong", alert.licence), ": counted, shown, and not a breach."]
        : "No licence covers this play.",
    ),
    el(
      "p.row.wrap",
      el("a.button.quiet", { href: `#/references?q=${part(alert.reference)}` }, "The reference"),
      el("a.button.quiet", { href: `#/alerts?reference=${part(alert.reference)}` }, "All its alerts"),
    ),
    can("write") &&
      el(
        "div.row.wrap",
        button("Add a licence", { sign: "licensed" }, () => addLicence(alert)),
        button(
          "Exclude this span",
          { sign: "trash", title: "An ident or end credits, say: seconds of the reference that never alert" },
          () => exclude(alert),
        ),
      ),
  );
}

function addLicence(alert) {
  formDialog(
    "Licence",
    "Plays within it are counted and shown as licensed, one that is on air now included. What has ended stays as told.",
    licenceFields({ reference: alert.reference, channel: alert.channel }),
    "Add",
    async (values) => {
      await send("POST", "licences", licenceOf(values));
      toast("The licence holds from now on.");
    },
  );
}

async function exclude(alert) {
  const span = `${clock(alert.reference_start)}–${clock(alert.reference_end)}`;
  const sentence = `Seconds ${span} of ${alert.title || alert.reference} will never alert again, on any channel. It can be taken back on the page of references.`;
  if (!(await confirmed("Exclude this span?", sentence, "Exclude"))) return;
  try {
    const note = `from alert ${alert.id}`;
    await send("POST", `references/${part(alert.reference)}/exclusions`, {
      start_s: alert.reference_start,
      end_s: alert.reference_end,
      note,
    });
    toast(`${span} is excluded.`);
  } catch (error) {
    toast(error.message, "error");
  }
}
