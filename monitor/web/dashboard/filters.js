// Which alerts are asked for, and all of them as a table for a spreadsheet.

import { all } from "./api.js";
import { button, el, field, select } from "./dom.js";
import { dayBounds, withOffset, ZONE } from "./times.js";

const MOST_IN_A_FILE = 10000;

/** What is asked for; kept in the address, so that it can be sent to a colleague. */
export class Filters {
  constructor(query) {
    this.values = Object.fromEntries([...query].filter(([, value]) => value));
  }

  get any() {
    return Object.keys(this.values).length > 0;
  }

  api() {
    const { day, ...rest } = this.values;
    if (day) [rest.since, rest.until] = dayBounds(day);
    return rest;
  }

  /** Whether an alert that just came would be in the list. */
  fits(alert) {
    const { channel, reference, owner, status, review: wanted, licensed, min_score: least, since, until } = this.api();
    return (
      (!channel || alert.channel === channel) &&
      (!reference || alert.reference === reference) &&
      (!owner || alert.owner === owner) &&
      (!status || alert.status === status) &&
      (!wanted || (alert.review?.decision ?? "none") === wanted) &&
      (!licensed || String(Boolean(alert.licence)) === licensed) &&
      (!least || alert.score >= Number(least)) &&
      (!since || (alert.started_at && alert.started_at >= since && alert.started_at < until))
    );
  }

  async form(signal) {
    const [channels, references] = await Promise.all([
      all("channels", {}, 1000, signal),
      all("references", {}, 1000, signal),
    ]);
    const named = (items) => [["", "all"], ...items];
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
      field("Channel", select("channel", named(channels.map(({ name }) => [name, name]).sort()), values.channel)),
      field(
        "Reference",
        el("input", { name: "reference", list: "reference-ids", value: values.reference ?? "", placeholder: "id" }),
      ),
      field("Owner", el("input", { name: "owner", list: "owners", value: values.owner ?? "" })),
      field(
        "Status",
        select(
          "status",
          named([
            ["open", "on air now"],
            ["ended", "ended"],
            ["retracted", "retracted"],
          ]),
          values.status,
        ),
      ),
      field(
        "Review",
        select(
          "review",
          named([
            ["none", "to be reviewed"],
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
          named([
            ["false", "not licensed"],
            ["true", "licensed"],
          ]),
          values.licensed,
        ),
      ),
      field(
        "Least score",
        el("input", { name: "min_score", type: "number", min: 0, max: 1, step: "0.05", value: values.min_score ?? "" }),
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
      const asked = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
      location.hash = `#/alerts${asked.size ? `?${asked}` : ""}`;
    };
    form.addEventListener("change", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    // On a phone they would fill the screen before the first alert.
    return el(
      "details.filter-box",
      { open: this.any || matchMedia("(min-width: 800px)").matches },
      el("summary", this.any ? "Filters (in use)" : "Filters"),
      form,
    );
  }
}

/** A table for a spreadsheet: times in UTC and in the viewer's zone, whose name is in each line. */
export async function saveCsv(filters) {
  const alerts = await all("alerts", filters.api(), MOST_IN_A_FILE);
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
  const text =
    [columns.join(","), ...lines.map((line) => columns.map((column) => csvCell(line[column])).join(","))].join("\r\n") +
    "\r\n";
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: "alerts.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** A cell; one that a spreadsheet would run as a formula is made text. */
function csvCell(value) {
  const words = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(words) ? `'${words}` : words;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}
