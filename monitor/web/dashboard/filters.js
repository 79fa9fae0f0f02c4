// The filters of the list of alerts, and the filtered list as a CSV file.

import { all, get } from "./api.js";
import { button, el, field, select } from "./dom.js";
import { dayBounds, withOffset, ZONE } from "./times.js";

const MAX_CSV_ROWS = 10000;

// Whether an alert matches the value of a filter, by the filter's name in the API.
const MATCHERS = {
  channel: (alert, channel) => alert.channel === channel,
  reference: (alert, reference) => alert.reference === reference,
  owner: (alert, owner) => alert.owner === owner,
  status: (alert, status) => (status === "valid" ? alert.status !== "retracted" : alert.status === status),
  review: (alert, decision) => (alert.review?.decision ?? "none") === decision,
  licensed: (alert, licensed) => String(Boolean(alert.licence)) === licensed,
  min_confidence: (alert, least) => alert.confidence !== null && alert.confidence >= Number(least),
  since: (alert, since) => alert.started_at && alert.started_at >= since,
  until: (alert, until) => alert.started_at && alert.started_at < until,
};

/** The filters; they are part of the address, so that a filtered list can be shared. */
export class Filters {
  constructor(query) {
    this.values = Object.fromEntries([...query].filter(([, value]) => value));
  }

  get any() {
    return Object.keys(this.values).length > 0;
  }

  api() {
    const { day, status, ...rest } = this.values;
    if (day) [rest.since, rest.until] = dayBounds(day);
    if (status !== "all") rest.status = status ?? "valid"; // retracted alerts are shown on request
    return rest;
  }

  /** Whether a new alert belongs in the list. */
  matches(alert) {
    const values = this.api();
    return Object.entries(MATCHERS).every(([name, matches]) => !values[name] || matches(alert, values[name]));
  }

  async form(signal) {
    const [channels, references, system] = await Promise.all([
      all("channels", {}, 1000, signal),
      all("references", {}, 1000, signal),
      get("system", {}, signal),
    ]);
    const orAll = (items) => [["", "all"], ...items];
    const list = (id, names) =>
      el(
        "datalist",
        { id },
        [...new Set(names)].sort().map((name) => el("option", { value: name })),
      );
    const { values } = this;
    const form = el(
      "form.filters",
      { "aria-label": "Filters" },
      field("Channel", select("channel", orAll(channels.map(({ name }) => [name, name]).sort()), values.channel)),
      field(
        "Reference",
        el("input", { name: "reference", list: "reference-ids", value: values.reference ?? "", placeholder: "id" }),
      ),
      field("Owner", el("input", { name: "owner", list: "owners", value: values.owner ?? "" })),
      field(
        "Status",
        select(
          "status",
          [
            ["", "all but retracted"],
            ["open", "on air now"],
            ["ended", "ended"],
            ["retracted", "retracted"],
            ["all", "all"],
          ],
          values.status,
        ),
      ),
      field(
        "Review",
        select(
          "review",
          orAll([
            ["none", "not reviewed"],
            ["confirmed", "confirmed"],
            ["false", "false positive"],
            ["licensed", "licensed"],
          ]),
          values.review,
        ),
      ),
      field(
        "Licence",
        select(
          "licensed",
          orAll([
            ["false", "not licensed"],
            ["true", "licensed"],
          ]),
          values.licensed,
        ),
      ),
      field(
        "Minimum confidence",
        el("input", {
          name: "min_confidence",
          type: "number",
          min: 0,
          max: 1,
          step: "0.05",
          value: values.min_confidence ?? "",
          placeholder: system.min_confidence,
          title: `The chance that an alert is right. Alerts start at ${system.min_confidence} (alerting.min_confidence).`,
        }),
      ),
      field("Day", el("input", { name: "day", type: "date", value: values.day ?? "" })),
      button("Clear", { kind: "quiet", disabled: !this.any }, () => (location.hash = "#/alerts")),
      list(
        "reference-ids",
        references.map(({ id }) => id),
      ),
      list("owners", references.map(({ owner }) => owner).filter(Boolean)),
    );
    const apply = () => {
      const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
      location.hash = `#/alerts${query.size ? `?${query}` : ""}`;
    };
    form.addEventListener("change", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    // Closed on a phone, where they would fill the screen before the first alert.
    return el(
      "details.filter-box",
      { open: this.any || matchMedia("(min-width: 800px)").matches },
      el("summary", this.any ? "Filters (active)" : "Filters"),
      form,
    );
  }
}

/** Saves the filtered alerts as CSV: times in UTC and in the viewer's zone, which each row names. */
export async function saveCsv(filters) {
  const alerts = await all("alerts", filters.api(), MAX_CSV_ROWS);
  const columns = [
    "id",
    "status",
    "channel",
    "reference",
    "title",
    "owner",
    "started_at_utc",
    "ended_at_utc",
    "started_at_local",
    "ended_at_local",
    "time_zone",
    "channel_start",
    "channel_end",
    "reference_start",
    "reference_end",
    "speed",
    "ambiguous",
    "confidence",
    "score",
    "matched_seconds",
    "coverage_channel",
    "coverage_reference",
    "unseen_seconds",
    "licence",
    "review",
    "reviewed_by",
  ];
  const lines = alerts.map((alert) => ({
    ...alert,
    started_at_utc: alert.started_at,
    ended_at_utc: alert.ended_at,
    started_at_local: withOffset(alert.started_at),
    ended_at_local: withOffset(alert.ended_at),
    time_zone: ZONE,
    unseen_seconds: alert.gaps.reduce((sum, gap) => sum + gap.seconds, 0),
    review: alert.review?.decision,
    reviewed_by: alert.review?.by,
  }));
  const rows = [columns, ...lines.map((line) => columns.map((column) => csvCell(line[column])))];
  const text = rows.map((cells) => `${cells.join(",")}\r\n`).join("");
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: "alerts.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** A cell; text that a spreadsheet would run as a formula is quoted. */
function csvCell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
