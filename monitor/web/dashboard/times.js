// Times come in UTC and are shown in the viewer's zone, which the header names; the title of each has UTC.

import { el } from "./dom.js";

export const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";

const format = (options) => new Intl.DateTimeFormat("en-GB", { hourCycle: "h23", ...options });
const DAY = format({ day: "numeric", month: "short", year: "numeric" });
const TIME = format({ hour: "2-digit", minute: "2-digit", second: "2-digit" });
const SHORT_ZONE = format({ timeZoneName: "short" });
const OFFSET = format({ timeZoneName: "longOffset" });

function part(formatter, date) {
  return formatter.formatToParts(date).find((piece) => piece.type === "timeZoneName")?.value ?? "UTC";
}

/** "+01:00" at that moment. */
function offset(date) {
  return part(OFFSET, date).replace(/^GMT/, "") || "+00:00";
}

/** "Europe/Berlin, UTC+01:00": the zone of all times on the page. */
export function zoneName(date = new Date()) {
  return ZONE === "UTC" ? ZONE : `${ZONE}, UTC${offset(date)}`;
}

/** A moment as an element: "16 Nov 2026, 09:00:12 CET", or only the time if it is today. */
export function moment(iso, { full = false } = {}) {
  if (!iso) return el("span.muted", "–");
  const date = new Date(iso);
  const today = DAY.format(date) === DAY.format(new Date());
  const text = full
    ? `${DAY.format(date)}, ${TIME.format(date)} ${part(SHORT_ZONE, date)}`
    : today
      ? TIME.format(date)
      : `${DAY.format(date)}, ${TIME.format(date)}`;
  return el("time", { datetime: iso, title: `${iso} (UTC)` }, text);
}

/** A moment for a file: "2026-11-16T09:00:12+01:00". */
export function withOffset(iso) {
  if (!iso) return "";
  const date = new Date(iso);
  const day = format({ year: "numeric", month: "2-digit", day: "2-digit" }).formatToParts(date);
  const of = (type) => day.find((piece) => piece.type === type).value;
  return `${of("year")}-${of("month")}-${of("day")}T${TIME.format(date)}${offset(date)}`;
}

/** The time without the date. */
export function timeOf(date) {
  return TIME.format(date);
}

/** Seconds as a position on a time line: "1:02:03" or "2:03". */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** A position with tenths of a second: "3:04.5". */
export function tenths(seconds) {
  const rounded = Math.round(10 * Math.max(0, seconds)) / 10;
  return `${clock(rounded)}.${Math.floor(10 * (rounded % 1) + 0.5)}`;
}

/** Seconds as a length: "22 s", "3 min 4 s", "2 h 10 min". */
export function length(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor(whole / 60) % 60} min`;
  return `${Math.floor(whole / 86400)} days`;
}

/** First and last moment of a day of the viewer's zone ("2026-11-16"), in UTC. */
export function dayBounds(day) {
  const start = new Date(`${day}T00:00:00`);
  const end = new Date(start);
  end.setDate(end.getDate() + 1); // days may have 23 or 25 hours
  const utc = (date) => date.toISOString().replace(/\.\d+Z$/, "Z");
  return [utc(start), utc(end)];
}

/** Bytes in a readable unit. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = number,
    unit = 0;
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1000, unit + 1];
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}
