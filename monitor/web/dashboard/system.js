// The system: readiness, time per stage, queues, index, evidence on disk, webhooks, tokens and the audit log.

import { all, can, get } from "./api.js";
import { audit } from "./audit.js";
import { el, put } from "./dom.js";
import { on } from "./events.js";
import { bytes, length, moment, ZONE } from "./times.js";
import { describeState } from "./channels.js";
import { webhooks } from "./webhooks.js";

const REFRESH_MS = 5000;
const STAGES = { encode: "Encoding a frame", match: "Matching a second", snapshot: "Writing a snapshot" };

export async function show(root, { signal }) {
  const body = el("div.stack"),
    hooks = el("section.panel"),
    tokens = el("section.panel"),
    auditLog = el("section.panel");
  put(
    root,
    el(
      "div.head",
      el("div", el("h1", "System")),
      el(
        "nav.row.wrap",
        { "aria-label": "For machines" },
        ["metrics", "openapi.json", "readyz", "livez"].map((name) => el("a.button.quiet", { href: name }, name)),
      ),
    ),
    body,
    can("admin") && el("div.stack", hooks, tokens, auditLog),
  );
  const draw = async () => {
    const [system, stages] = await Promise.all([get("system", {}, signal), stageTimes(signal)]);
    put(
      body,
      problems(system),
      figures(system),
      el("div.columns", stagesPanel(stages), queuesPanel(system), indexPanel(system)),
    );
  };
  const redraw = () => draw().catch(() => {});
  on(["reconnected"], redraw, signal);
  const timer = setInterval(() => document.hidden || redraw(), REFRESH_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  await draw();
  if (can("admin")) {
    await webhooks(hooks, signal);
    await drawTokens(tokens, signal);
    await audit(auditLog, signal);
  }
}

function problems(system) {
  const found = Object.entries(system.problems);
  if (!found.length)
    return el("section.ready", { data: { tone: "good" } }, el("h2", "Ready"), el("p", "All checks pass."));
  return el(
    "section.ready",
    { data: { tone: "bad" }, role: "alert" },
    el("h2", "Not ready"),
    el(
      "ul",
      found.map(([name, sentence]) => el("li", el("strong", `${name}: `), sentence)),
    ),
  );
}

function figures(system) {
  const { evidence, metrics } = system;
  const channels = Object.entries(system.channels).filter(([, n]) => n > 0);
  const seconds = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(1)} s`);
  const figure = (name, value, hint) => el("div.figure", el("dt", name), el("dd", value), hint && el("dd.hint", hint));
  return el(
    "dl.figures",
    figure(
      "Channels",
      String(channels.reduce((sum, [, n]) => sum + n, 0)),
      channels.map(([state, n]) => `${n} ${describeState(state)[0].toLowerCase()}`).join(", ") || "none",
    ),
    figure("References", String(system.references), `${length(system.reference_seconds)} of video`),
    figure("Detection latency, p95", seconds(metrics.detection_latency_p95_s), "from broadcast to alert"),
    figure("Dropped", String(metrics.dropped_total), "frames received but not matched"),
    evidence &&
      figure("Evidence", bytes(evidence.bytes), [
        el("meter", {
          min: 0,
          max: 1,
          high: 0.9,
          value: evidence.bytes / Math.max(1, evidence.quota_bytes),
          "aria-label": "share of the quota",
        }),
        ` of ${bytes(evidence.quota_bytes)}`,
      ]),
    figure("Version", system.version, [`model ${system.model}, since `, moment(system.started_at)]),
  );
}

/** Mean time of each stage from /metrics; empty if that is served elsewhere. */
async function stageTimes(signal) {
  try {
    const reply = await fetch("metrics", { signal, headers: { Accept: "text/plain" } });
    if (!reply.ok) return [];
    const values = {};
    for (const [, part, stage, value] of (await reply.text()).matchAll(
      /^copywatch_stage_duration_seconds_(sum|count)\{stage="([^"]+)"\} (\S+)$/gm,
    ))
      (values[stage] ??= {})[part] = Number(value);
    return Object.entries(values)
      .filter(([, { count }]) => count > 0)
      .map(([stage, { sum, count }]) => [STAGES[stage] ?? stage, (1000 * sum) / count]);
  } catch {
    return [];
  }
}

function stagesPanel(stages) {
  const longest = Math.max(...stages.map(([, ms]) => ms), 1);
  return el(
    "section.panel",
    el("h2", "Stages"),
    stages.length
      ? el(
          "dl.bars",
          stages.map(([name, ms]) => {
            const bar = el("i.bar", { "aria-hidden": "true" });
            bar.style.width = `${(100 * ms) / longest}%`;
            return el("div", el("dt", name), el("dd", `${ms.toFixed(1)} ms`, bar));
          }),
        )
      : el("p.muted", "Nothing has been matched yet."),
    el("p.hint", "Mean per second of a channel since start."),
  );
}

function queuesPanel(system) {
  const sinks = Object.entries(system.backlog);
  return el(
    "section.panel",
    el("h2", "Queued events"),
    sinks.length
      ? el(
          "dl.pairs",
          sinks.map(([sink, n]) => el("div", el("dt", sink), el("dd", n ? `${n} events` : "none"))),
        )
      : el("p.muted", "No sink is configured; alerts are only stored here."),
  );
}

function indexPanel(system) {
  const { index } = system;
  return el(
    "section.panel",
    el("h2", "Index"),
    el(
      "dl.pairs",
      [
        ["Kind", index.kind],
        ["Generation", index.generation],
        ["Searched", length(index.seconds)],
        ["Up to date at", moment(index.refreshed_at)],
        ["Encoder", system.encoder_id],
        ["Server's zone", system.time_zone],
        ["Your zone", ZONE],
      ].map(([name, value]) =>
        el("div", el("dt", name), el("dd", value instanceof Node ? value : String(value ?? "–"))),
      ),
    ),
  );
}

async function drawTokens(panel, signal) {
  const tokens = await all("tokens", {}, 200, signal);
  put(
    panel,
    el("h2", "Tokens"),
    tokens.length
      ? el(
          "dl.pairs",
          tokens.map((token) =>
            el(
              "div",
              el("dt", token.name),
              el("dd", describeToken(token)),
            ),
          ),
        )
      : el("p.muted", "None: only this machine has access, by the link that the server printed at its start."),
    el(
      "p.hint",
      "Create one with ",
      el("code", "copywatch tokens add NAME --scope read|write|admin"),
      ", which prints it once.",
    ),
  );
}

function describeToken(token) {
  const parts = [token.scope, " since ", moment(token.created_at)];
  parts.push(...(token.expires_at ? [", expires ", moment(token.expires_at)] : [", never expires"]));
  parts.push(...(token.last_used_at ? [", last used ", moment(token.last_used_at)] : [", not used yet"]));
  return parts;
}
