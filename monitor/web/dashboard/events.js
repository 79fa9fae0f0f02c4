// The API's server-sent events, read with fetch so that silence is noticed (the server sends a comment every 15 s), a
// login is possible, and reading resumes after the last event received.

import { request } from "./api.js";

const SILENCE_MS = 40000;
const MAX_RETRY_MS = 15000;
const FIRST_STATE_MS = 3000;

const listeners = new Map(); // kind of event -> functions
let lastId = null;
let isShown = false; // whether pages have loaded anything yet

/** Calls back for each event of these kinds ("alert.started", "channel", "state", …) until the signal aborts. */
export function on(kinds, call, signal) {
  for (const kind of kinds) {
    if (!listeners.has(kind)) listeners.set(kind, new Set());
    listeners.get(kind).add(call);
    signal?.addEventListener("abort", () => listeners.get(kind).delete(call));
  }
}

export const ALERTS = ["alert.started", "alert.updated", "alert.ended", "alert.retracted", "alert.reviewed"];

function dispatch(kind, data) {
  for (const call of [...(listeners.get(kind) ?? [])]) {
    try {
      call(data, kind);
    } catch (error) {
      reportError(error); // a page's error is not a lost connection
    }
  }
}

/** Listens forever. "state" carries {up, since}: since when the connection is lost, or null. */
export function listen() {
  const first = new Promise((resolve) => on(["state"], resolve));
  listenForever();
  // A page that loads before events arrive could miss a change in between, so it waits for the first state, briefly.
  return Promise.race([first, new Promise((resolve) => setTimeout(resolve, FIRST_STATE_MS))]).then(() => {
    isShown = true;
  });
}

async function listenForever() {
  let since = null;
  for (let wait = 1000; ; wait = Math.min(2 * wait, MAX_RETRY_MS)) {
    const stop = new AbortController();
    try {
      const headers = lastId === null ? {} : { "Last-Event-ID": lastId };
      const reply = await request("events", {
        headers: { Accept: "text/event-stream", ...headers },
        signal: stop.signal,
      });
      since = null;
      wait = 500;
      dispatch("state", { up: true, since });
      if (isShown) dispatch("reconnected"); // pages reload: missed changes may be older than the server can repeat
      await read(reply.body.getReader(), stop);
    } catch {
      // a lost connection: reported below
    }
    stop.abort();
    since ??= new Date();
    dispatch("state", { up: false, since });
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
      if (line !== "") parseLine(line, event);
      else {
        if (event.data.length) dispatch(event.kind, JSON.parse(event.data.join("\n")));
        event = { kind: "message", data: [] };
      }
    }
  }
}

function parseLine(line, event) {
  const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line);
  if (name === "event") event.kind = value;
  else if (name === "data") event.data.push(value);
  else if (name === "id") lastId = value;
}
