// Both time lines of an alert: the broadcast above, the whole reference below, and a band that joins the copy.
// Gaps (seconds that were not received) are hatched, pauses (something else was on air) are left open.

import { el, put, svg } from "./dom.js";
import { clock, length, moment } from "./times.js";

const HEIGHT = 168,
  LANE = 30,
  LIVE_Y = 30,
  REF_Y = 108,
  EDGE = 8;

export function timeLines(panel, alert, signal) {
  const stage = el("div.timelines");
  put(
    panel,
    el("h2", "Time lines"),
    stage,
    el(
      "ul.legend",
      el("li", el("i.key.matched"), "matched"),
      alert.gaps.length > 0 && el("li", el("i.key.gap"), "missing"),
      alert.pauses?.length > 0 && el("li", el("i.key.pause"), "something else"),
      el("li", el("i.key.rest"), "rest of the reference"),
    ),
    description(alert),
  );
  const draw = () => put(stage, drawing(alert, Math.max(260, stage.clientWidth)));
  const watcher = new ResizeObserver(draw);
  watcher.observe(stage);
  signal.addEventListener("abort", () => watcher.disconnect());
}

/** The same as text, for screen readers and for copying. */
function description(alert) {
  return el(
    "p.muted.small",
    `Broadcast ${clock(alert.channel_start)}–${clock(alert.channel_end)} in channel time`,
    alert.started_at && [" (", moment(alert.started_at), alert.ended_at && ["–", moment(alert.ended_at)], ")"],
    ` matches ${clock(alert.reference_start)}–${clock(alert.reference_end)} of the reference`,
    alert.reference_seconds ? `, which is ${length(alert.reference_seconds)} long.` : ".",
  );
}

function drawing(alert, width) {
  const live = alert.channel_end - alert.channel_start;
  const pad = Math.max(3, 0.15 * live);
  const liveX = scale(alert.channel_start - pad, alert.channel_end + pad, width);
  const refX = scale(0, Math.max(alert.reference_seconds || 0, alert.reference_end), width);
  const breaks = [
    ...alert.gaps.map((gap) => ({ ...gap, kind: "gap" })),
    ...(alert.pauses ?? []).map((pause) => ({ ...pause, kind: "pause" })),
  ]
    .map((one) => ({
      ...one,
      from: Math.max(one.at, alert.channel_start),
      to: Math.min(one.at + one.seconds, alert.channel_end),
    }))
    .filter((one) => one.to > one.from)
    .sort((a, b) => a.from - b.from);
  const spans = [];
  let at = alert.channel_start;
  for (const one of [...breaks, { from: alert.channel_end, to: alert.channel_end }]) {
    if (one.from > at) spans.push([at, one.from]);
    at = Math.max(at, one.to);
  }
  const bar = (kind, x, from, to, y, title) =>
    svg(
      `rect.${kind}`,
      { x: x(from), y, width: Math.max(2, x(to) - x(from)), height: LANE, rx: 3 },
      title && svg("title", title),
    );
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: "img",
      "aria-label": "Both time lines, described below",
    },
    svg(
      "defs",
      svg(
        "pattern",
        { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("rect.hatch-ground", { width: 7, height: 7 }),
        svg("rect.hatch-line", { width: 2.5, height: 7 }),
      ),
    ),
    svg("text.lane", { x: EDGE, y: LIVE_Y - 10 }, `On air: ${alert.channel}`),
    svg("text.lane", { x: EDGE, y: REF_Y + LANE + 24 }, `Reference: ${alert.title || alert.reference}`),
    svg("rect.track", { x: EDGE, y: LIVE_Y, width: width - 2 * EDGE, height: LANE, rx: 3 }),
    svg("rect.track", { x: EDGE, y: REF_Y, width: width - 2 * EDGE, height: LANE, rx: 3 }),
    svg("polygon.band", {
      points: [
        [liveX(alert.channel_start), LIVE_Y + LANE],
        [liveX(alert.channel_end), LIVE_Y + LANE],
        [refX(alert.reference_end), REF_Y],
        [refX(alert.reference_start), REF_Y],
      ]
        .map((point) => point.map((n) => n.toFixed(1)).join())
        .join(" "),
    }),
    spans.map(([from, to]) => bar("matched", liveX, from, to, LIVE_Y, `matched ${clock(from)}–${clock(to)}`)),
    bar(
      "matched",
      refX,
      alert.reference_start,
      alert.reference_end,
      REF_Y,
      `${clock(alert.reference_start)}–${clock(alert.reference_end)}`,
    ),
    breaks.map((one) =>
      bar(
        one.kind,
        liveX,
        one.from,
        one.to,
        LIVE_Y,
        one.kind === "gap"
          ? `missing: ${length(one.seconds)} at ${clock(one.at)} (${one.reason})`
          : `something else: ${length(one.seconds)} at ${clock(one.at)}`,
      ),
    ),
    labels(liveX, [alert.channel_start, alert.channel_end], LIVE_Y + LANE + 14, width),
    labels(refX, [alert.reference_start, alert.reference_end], REF_Y - 5, width),
  );
}

function scale(from, to, width) {
  return (second) => EDGE + ((second - from) / (to - from)) * (width - 2 * EDGE);
}

/** The times at both ends, placed inside the drawing and apart. */
function labels(x, [from, to], y, width) {
  const left = Math.min(Math.max(x(from), 22), width - 80),
    right = Math.max(Math.min(x(to), width - 22), left + 50);
  return [svg("text.tick", { x: left, y }, clock(from)), svg("text.tick", { x: right, y }, clock(to))];
}
