// One alert: broadcast beside reference, both time lines, the similarity matrix, and the review.

import { can, get, part, request, send } from "./api.js";
import { chipsOf, DECISIONS, frame, isOtherSpeed, review, pollEvidence, confidenceMeter, whenOf } from "./alerts.js";
import { button, askToConfirm, el, field, formDialog, icon, put, toast } from "./dom.js";
import { licenceFields, licenceOf } from "./licences.js";
import { ALERTS, on } from "./events.js";
import { matrixView } from "./matrix.js";
import { timeLines } from "./timelines.js";
import { clock, length, moment, tenths, timeOf, ZONE } from "./times.js";

const EVENTS = {
  "alert.started": "Emitted: a copy is on air",
  "alert.updated": "Updated: the copy continues",
  "alert.ended": "Ended",
  "alert.retracted": "Retracted",
  "alert.reviewed": "Reviewed",
};
const PLACES = { start: "Start", middle: "Middle", end: "End" };

export async function show(root, { id, signal }) {
  let alert = await get(`alerts/${part(id)}`, {}, signal);
  const parts = {
    head: el("div"),
    review: el("section.panel.review"),
    frames: el("section.panel.pictures"),
    lines: el("section.panel"),
    matrix: el("section.panel"),
    numbers: el("section.panel"),
    events: el("section.panel"),
    rights: el("section.panel"),
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
        { "aria-label": "Review and numbers" },
        parts.review,
        parts.numbers,
        parts.rights,
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
            isOtherSpeed(alert) ? `, at ${alert.speed.toFixed(2)} times its speed` : "",
            ".",
          ),
        ),
        el("div.chips", chipsOf(alert)),
      ),
    );
    drawReview(parts.review, alert, (reviewed) => {
      alert = { ...alert, ...reviewed };
      draw();
    });
    timeLines(parts.lines, alert, signal);
    drawNumbers(parts.numbers, alert);
    drawRights(parts.rights, alert);
    drawEvents(parts.events, alert);
  };
  const drawEvidence = async () => {
    let evidence = null,
      sentence = "Evidence is created while the copy is on air and appears here automatically.";
    try {
      if (alert.has_evidence) evidence = await get(`alerts/${part(id)}/evidence`, {}, signal);
    } catch (error) {
      sentence = error.message;
    }
    drawFrames(parts.frames, alert, evidence, sentence);
    // A matrix that has the focus is not replaced by a newer one.
    if (!parts.matrix.contains(document.activeElement)) matrixView(parts.matrix, alert, evidence, sentence, signal);
  };
  const reload = async () => {
    const before = `${alert.has_evidence} ${alert.status} ${alert.seq}`;
    alert = await get(`alerts/${part(id)}`, {}, signal);
    draw();
    if (before !== `${alert.has_evidence} ${alert.status} ${alert.seq}`) await drawEvidence();
  };
  on(ALERTS, (event) => event.id === id && reload().catch(() => {}), signal);
  on(["reconnected"], () => reload().catch(() => {}), signal);
  addEventListener(
    "shortcut",
    async (event) => {
      if (event.detail === "e") saveArchive(alert);
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
  pollEvidence(alert, signal, () => reload().catch(() => {}));
}

function drawReview(panel, alert, onReviewed) {
  const before = panel.querySelector("input[name=note]"); // the viewer may be typing while the alert is updated
  const note = before ?? el("input", { name: "note", maxlength: 500, placeholder: "optional" });
  const isTyping = before !== null && before === document.activeElement;
  const decide = async (decision) => {
    const reviewed = await review(alert, decision, note.value.trim());
    if (reviewed) {
      note.value = "";
      onReviewed(reviewed);
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
      : el("p.muted", "Not reviewed yet."),
    can("write")
      ? [
          el(
            "div.row.wrap",
            DECISIONS.map(([decision, label, , letter]) =>
              button(
                label,
                {
                  iconName: decision,
                  kind: decision,
                  "data-decision": decision,
                  "aria-pressed": String(alert.review?.decision === decision),
                  title: `${label} (${letter})`,
                },
                () => decide(decision),
              ),
            ),
          ),
          field("Note", note),
        ]
      : el("p.hint", "Your token is read-only."),
    alert.reason && el("p", el("span.muted", "Reason: "), alert.reason),
    el(
      "p.row.wrap",
      button("Export as zip", { iconName: "download", title: "Pictures, numbers and a manifest of SHA-256 sums" }, () =>
        saveArchive(alert),
      ),
    ),
  );
  if (isTyping) note.focus();
}

/** Saves the zip; it is fetched, so that a login or an error appears on this page. */
async function saveArchive(alert) {
  try {
    const reply = await request(`alerts/${part(alert.id)}/export`, { query: { time_zone: ZONE } });
    const url = URL.createObjectURL(await reply.blob());
    el("a", { href: url, download: `alert-${alert.id}.zip` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  } catch (error) {
    toast(error.message, "error");
  }
}

/** The time of day of a picture; a recording has none. */
const airedAt = (pair) => (pair.aired_at ? ` · ${timeOf(new Date(pair.aired_at))}` : "");

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
            frame(alert, one.air, `On air ${tenths(one.stream_s)}${airedAt(one)}`, one.air ? null : one.note),
            frame(
              alert,
              one.reference,
              one.ref_s === null ? "Reference" : `Reference ${tenths(one.ref_s)}`,
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
      "Confidence",
      el("span.inline-confidence", confidenceMeter(alert)),
      `The chance that the alert is right: of alerts that say 90 %, nine in ten are. Alerts start at ${percent(alert.min_confidence)} (setting alerting.min_confidence).`,
    ],
    [
      "Score",
      alert.score.toFixed(2),
      "The method's own number: mean of similarity times mask over the aligned seconds, reduced for short copies.",
    ],
    [
      "Coverage of the broadcast",
      percent(alert.coverage_channel),
      "Share of the broadcast seconds between start and end that were matched.",
    ],
    [
      "Coverage of the reference",
      percent(alert.coverage_reference),
      "Share of the whole reference between its start and end here.",
    ],
    ["Matched", length(alert.matched_seconds), "Seconds of the broadcast on the alignment."],
    [
      "Speed",
      alert.speed === null ? "not known" : `${alert.speed.toFixed(2)}×`,
      "Seconds of the reference per second of the broadcast; not known below 15 s or where the place is uncertain.",
    ],
    [
      "Detected after",
      length(alert.detected_at - alert.channel_start),
      "From the first broadcast second of the copy to the second that triggered the alert.",
    ],
    [
      "Missing",
      alert.gaps.length
        ? alert.gaps.map((gap) => `${length(gap.seconds)} at ${clock(gap.at)} (${gap.reason})`).join(", ")
        : "none",
      "Seconds within the copy or just before it that were not received.",
    ],
  ];
  if (alert.ambiguous)
    rows.push([
      "May also be",
      alert.alternatives.map(([start, end]) => `${clock(start)}–${clock(end)}`).join(", "),
      "The reference shows the same in these places, and the broadcast does not tell which one is on air.",
    ]);
  if (alert.versions?.length)
    rows.push([
      "Other versions",
      alert.versions.map((one) => `${one.reference} ${clock(one.reference_start)}–${clock(one.reference_end)}`).join(", "),
      "Other references that show the same pictures.",
    ]);
  if (alert.reason) rows.push(["Reason", alert.reason, "Why the alert ended or was retracted."]);
  if (alert.pauses?.length)
    rows.push([
      "Pauses",
      alert.pauses.map((pause) => `${length(pause.seconds)} at ${clock(pause.at)}`).join(", "),
      "Seconds within the copy that show something else.",
    ]);
  put(
    panel,
    el("h2", "Numbers"),
    el(
      "dl.numbers",
      rows.map(([name, value, meaning]) => el("div", el("dt", name), el("dd", value), el("dd.hint", meaning))),
    ),
    alert.continues &&
      el("p", el("a", { href: `#/alerts/${part(alert.continues)}` }, "This alert continues another one.")),
    el("p.hint", `Model ${alert.model} · alert ${alert.id}`),
  );
}

/** All events and reviews of the alert, in order. */
function drawEvents(panel, alert) {
  const events = (alert.events ?? []).map(({ emitted_at, type, confidence }) => [
    emitted_at,
    EVENTS[type] ?? type,
    confidence !== null && confidence !== undefined && ` · confidence ${Math.round(100 * confidence)} %`,
  ]);
  const reviews = (alert.reviews ?? []).map(({ at, by, decision, note }) => [
    at,
    DECISIONS.find(([name]) => name === decision)?.[2] ?? decision,
    ` · by ${by}${note ? `: ${note}` : ""}`,
  ]);
  const entries = [...events, ...reviews].sort(([one], [other]) => Date.parse(one) - Date.parse(other));
  put(
    panel,
    el("h2", "Events and reviews"),
    el(
      "ol.log",
      entries.map(([at, text, more]) => el("li", moment(at), " ", el("strong", text), more && el("span.muted", more))),
    ),
  );
}

function drawRights(panel, alert) {
  put(
    panel,
    el("h2", "Rights"),
    el(
      "p",
      alert.licence
        ? ["Licensed by ", el("strong", alert.licence), ": recorded, but not a breach."]
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
        button("Add a licence", { iconName: "licensed" }, () => addLicence(alert)),
        button(
          "Exclude this span",
          { iconName: "trash", title: "For idents and end credits: these seconds of the reference never alert" },
          () => exclude(alert),
        ),
      ),
  );
}

function addLicence(alert) {
  formDialog(
    "Licence",
    "Plays that it covers are recorded as licensed, including one on air now. Ended alerts do not change.",
    licenceFields({ reference: alert.reference, channel: alert.channel }),
    "Add",
    async (values) => {
      await send("POST", "licences", licenceOf(values));
      toast("Licence added; it applies from now on.");
    },
  );
}

async function exclude(alert) {
  const span = `${clock(alert.reference_start)}–${clock(alert.reference_end)}`;
  const sentence = `Seconds ${span} of ${alert.title || alert.reference} will never alert again, on any channel. You can undo this on the References page.`;
  if (!(await askToConfirm("Exclude this span?", sentence, "Exclude"))) return;
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
