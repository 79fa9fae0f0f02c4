// The audit log: who changed what, when and from where. For admins.

import { address, get, part } from "./api.js";
import { button, el, field, put, select, table } from "./dom.js";
import { moment } from "./times.js";

const PAGE = 25;
const TONES = { done: "good", failed: "warn", refused: "bad", unknown: "warn" };
const RESULTS = [
  ["", "Any result"],
  ["done", "Done"],
  ["failed", "Failed"],
  ["refused", "Refused"],
  ["unknown", "Unknown"],
];

export async function audit(panel, signal) {
  const list = el("div.stack"),
    form = el(
      "form.row.wrap",
      { "aria-label": "Filter the audit log" },
      field("Who", el("input", { name: "who", maxlength: 200 })),
      field("Action", el("input", { name: "action", maxlength: 200, placeholder: "licences add" })),
      field("Result", select("result", RESULTS)),
      el("button.button", { type: "submit" }, "Show"),
    );
  const draw = () => drawPage(list, Object.fromEntries(new FormData(form)), signal);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    draw();
  });
  put(
    panel,
    el(
      "div.row.between.wrap",
      el("h2", "Audit log"),
      el("a.button.quiet", { href: address("audit/export"), download: "audit.jsonl" }, "Export"),
    ),
    form,
    list,
    el(
      "p.hint",
      "Entries form a hash chain; ",
      el("code", "copywatch audit verify"),
      " finds one that was changed or removed.",
    ),
  );
  await draw();
}

async function drawPage(list, filters, signal) {
  const rows = el("div");
  put(list, rows);
  let cursor;
  const entries = [];
  const more = button("Older entries", { kind: "quiet" }, () => load());
  const load = async () => {
    try {
      const page = await get("audit", { limit: PAGE, ...filters, cursor }, signal);
      entries.push(...page.items);
      cursor = page.next;
      put(
        rows,
        entries.length
          ? table(["Time", "Who", "Address", "Action", "Object", "Result", "Details"], entries.map(row))
          : el("p.muted", "No entry."),
      );
      put(list, rows, cursor && more);
    } catch (error) {
      if (!signal.aborted) put(list, rows, el("p.problem", { role: "alert" }, error.message));
    }
  };
  await load();
}

function row(entry) {
  const [alert] = entry.alerts;
  const details = Object.entries(entry.details).map(([name, value]) => `${name} ${value}`);
  if (entry.about) details.unshift(`about ${entry.about}`);
  return [
    moment(entry.at),
    entry.erased ? el("span.muted", "erased") : (entry.who ?? "–"),
    [entry.address ?? "–", el("span.muted.small", ` ${entry.via}`)],
    entry.action,
    alert ? el("a", { href: `#/alerts/${part(alert)}` }, entry.object ?? alert) : (entry.object ?? "–"),
    el(
      "span.chip",
      { data: { tone: TONES[entry.result] ?? "idle" } },
      entry.status ? `${entry.result} ${entry.status}` : entry.result,
    ),
    details.join(", ") || "–",
  ];
}
