// What happens, as it happens: the API's server-sent events, read with fetch so that silence is noticed (a comment
// comes every 15 s), a login is possible, and reading goes on after the last event that was seen.

import { ask } from "./api.js";

const SILENCE_MS = 40000;
const LONGEST_WAIT_MS = 15000;
const PATIENCE_MS = 3000;

const listeners = new Map(); // kind of event -> functions
let lastId = null;
let asked = false; // whether pages have asked for anything yet

/** Calls back for each event of the kinds ("alert.started", "channel", "state", …) until the signal. */
export function on(kinds, call, signal) {
  for (const kind of kinds) {
    if (!listeners.has(kind)) listeners.set(kind, new Set());
    listeners.get(kind).add(call);
    signal?.addEventListener("abort", () => listeners.get(kind).delete(call));
  }
}

export const ALERTS = ["alert.started", "alert.updated", "alert.ended", "alert.retracted", "alert.reviewed"];

function tell(kind, data) {
  for (const call of [...(listeners.get(kind) ?? [])]) {
    try {
      call(data, kind);
    } catch (error) {
      reportError(error); // a page's fault is not a lost connection
    }
  }
}

/** Listens for ever. "state" is told with {up, since}: since when it is lost, or null. */
export function listen() {
  const first = new Promise((resolve) => on(["state"], resolve));
  keepListening();
  // Who asks before events come could miss what happens in between, so a page waits for the first word, but not long.
  return Promise.race([first, new Promise((resolve) => setTimeout(resolve, PATIENCE_MS))]).then(() => (asked = true));
}

async function keepListening() {
  let since = null;
  for (let wait = 1000; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    const stop = new AbortController();
    try {
      const headers = lastId === null ? {} : { "Last-Event-ID": lastId };
      const reply = await ask("events", { headers: { Accept: "text/event-stream", ...headers }, signal: stop.signal });
      since = null;
      wait = 500;
      tell("state", { up: true, since });
      if (asked) tell("again"); // pages ask anew: what was missed may be older than what the server still has
      await read(reply.body.getReader(), stop);
    } catch {
      // a lost connection: told below
    }
    stop.abort();
    since ??= new Date();
    tell("state", { up: false, since });
    await new Promise((resolve) => setTimeout(resolve, wait * (0.75 + Math.random() / 2)));
  }
}

async function read(reader, stop) {
  const decoder = new TextDecoder();
  let rest = "",
    event = { kind: "message", data: [] };
  for (;;) {
    const watchdog = setTimeout(() => stop.abort(), SILENCE_MS);
    const { done, value } = await reader.read().finally(() => clearTimeout(watchdog));
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line !== "") take(line, event);
      else {
        if (event.data.length) tell(event.kind, JSON.parse(event.data.join("\n")));
        event = { kind: "message", data: [] };
      }
    }
  }
}

function take(line, event) {
  const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
  if (name === "event") event.kind = value;
  else if (name === "data") event.data.push(value);
  else if (name === "id") lastId = value;
}
