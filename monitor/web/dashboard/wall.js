// The live wall: one tile a channel, those that need somebody first.

import { address, all, can, part, send } from "./api.js";
import { button, confirmed, el, empty, field, formDialog, icon, put, select, toast } from "./dom.js";
import { ALERTS, on } from "./live.js";
import { clock, length, moment } from "./times.js";

const REFRESH_MS = 5000;
// In the order in which they need somebody. The tone is never alone: words stand beside it.
const STATES = {
  failed: ["Failed", "bad", "It cannot be reached or decoded"],
  denied: ["Refused", "bad", "The source refuses, or leads to a private address"],
  no_video: ["No video", "bad", "Sound comes, pictures do not"],
  stalled: ["Stalled", "bad", "No new second comes; connecting again"],
  impaired: ["Impaired", "warn", "Black, flat or frozen for a minute"],
  starting: ["Starting", "idle", "No picture has come yet"],
  ended: ["Ended", "idle", "The recording was read to its end"],
  up: ["On air", "good", "Seen and matched"],
};

export function describeState(state) {
  return STATES[state] ?? [state, "idle", ""];
}

export async function show(root, { signal }) {
  const wall = el("div.wall");
  const summary = el("p.lead");
  put(
    root,
    el(
      "div.head",
      el("div", el("h1", "Live"), summary),
      can("write") && button("Add a channel", { sign: "plus" }, addChannel),
    ),
    wall,
  );
  const tiles = new Map();
  let channels = [],
    open = new Map();

  const draw = () => {
    const order = Object.keys(STATES);
    const rank = (channel) => (order.indexOf(channel.state) + order.length) % order.length;
    channels.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
    summary.textContent = summarise(channels, open);
    if (!channels.length) {
      put(
        wall,
        empty(
          "No channel is watched yet",
          ["Try an address, add it, and it appears here; a running monitor needs no restart."],
          [
            "copywatch channels test URL",
            "copywatch channels add channel-5 URL --config copywatch.yaml",
            "copywatch serve --config copywatch.yaml",
          ],
        ),
      );
      tiles.clear();
      return;
    }
    for (const name of [...tiles.keys()]) if (!channels.some((channel) => channel.name === name)) tiles.delete(name);
    for (const channel of channels) {
      if (!tiles.has(channel.name)) tiles.set(channel.name, new Tile(channel.name, ask));
      tiles.get(channel.name).draw(channel, open);
    }
    const wanted = channels.map((channel) => tiles.get(channel.name).element);
    // Moved only where the order changed: a tile that is moved loses its focus.
    if (wanted.some((tile, at) => wall.children[at] !== tile) || wall.children.length !== wanted.length)
      put(wall, wanted);
  };
  const ask = async () => {
    const [found, alerts] = await Promise.all([
      all("channels", {}, 1000, signal),
      all("alerts", { status: "open" }, 1000, signal),
    ]);
    channels = found;
    open = new Map(alerts.map((alert) => [alert.id, alert]));
    draw();
  };
  const again = () => ask().catch(() => {}); // the banner says that the connection is lost

  on(
    ["channel"],
    (channel) => {
      channels = channels.filter((one) => one.name !== channel.name);
      if (channel.state !== "removed") channels.push(channel);
      draw();
    },
    signal,
  );
  on(
    ALERTS,
    (alert) => {
      if (alert.status === "open") open.set(alert.id, alert);
      else open.delete(alert.id);
      draw();
    },
    signal,
  );
  on(["again"], again, signal);
  const timer = setInterval(() => document.hidden || again(), REFRESH_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  await ask();
}

function summarise(channels, open) {
  if (!channels.length) return "";
  const bad = channels.filter((channel) => ["bad", "warn"].includes(describeState(channel.state)[1])).length;
  const words = [`${channels.length} ${channels.length === 1 ? "channel" : "channels"}`];
  words.push(bad ? `${bad} ${bad === 1 ? "needs" : "need"} attention` : "all well");
  words.push(open.size ? `${open.size} ${open.size === 1 ? "copy" : "copies"} on air now` : "no copy on air");
  return words.join(" · ");
}

class Tile {
  constructor(name, changed) {
    this.name = name;
    this.picture = el("img", { alt: `Newest picture of ${name}`, width: 320, height: 180, hidden: true });
    this.without = el("span.without", "No picture yet");
    this.state = el("span.state");
    this.ribbon = el("div.ribbons");
    this.facts = el("dl.facts");
    this.since = el("p.muted.small");
    const remove =
      can("write") &&
      el(
        "button.plain.remove",
        {
          type: "button",
          title: `Remove ${name}`,
          "aria-label": `Remove ${name}`,
          onclick: () => removeChannel(name, changed),
        },
        icon("trash"),
      );
    this.element = el(
      "article.tile",
      { "aria-label": name, tabindex: 0 },
      el("div.screen", this.picture, this.without, this.state, this.ribbon),
      el("div.body", el("div.row.between", el("h2", name), remove), this.since, this.facts),
    );
  }

  draw(channel, open) {
    const [words, tone, meaning] = describeState(channel.state);
    this.element.dataset.tone = tone;
    put(this.state, el("span.shape", { "aria-hidden": "true" }), words);
    this.state.dataset.tone = tone;
    this.state.title = meaning;
    put(this.since, meaning, " · since ", moment(channel.since));
    put(
      this.facts,
      fact("Lag", channel.lag_s === null ? "–" : `${channel.lag_s.toFixed(1)} s`),
      fact("Reconnects", channel.reconnects),
      fact("Not seen", length(channel.gap_seconds)),
      fact("Dropped", channel.dropped),
    );
    const mine = [...open.values()].filter((alert) => alert.channel === channel.name);
    put(
      this.ribbon,
      mine.map((alert) =>
        el(
          "a.ribbon",
          { href: `#/alerts/${part(alert.id)}`, class: alert.licence ? "licensed" : "" },
          el("strong", alert.title || alert.reference),
          ` from ${clock(alert.reference_start)}`,
          alert.licence ? " · licensed" : "",
        ),
      ),
    );
    this.element.classList.toggle(
      "matching",
      mine.some((alert) => !alert.licence),
    );
    this.refresh(channel);
  }

  /** The newest picture, swapped in when it is whole, so that nothing flickers. */
  async refresh(channel) {
    if (this.loading || this.shown === channel.last_second_at || !channel.last_second_at) return;
    this.loading = true;
    const next = new Image();
    next.src = address(`channels/${part(this.name)}/thumbnail`, { at: channel.last_second_at });
    try {
      await next.decode();
      this.picture.src = next.src;
      this.picture.hidden = false;
      this.without.hidden = true;
      this.shown = channel.last_second_at;
    } catch {
      // none yet: the words stay
    }
    this.loading = false;
  }
}

function fact(name, value) {
  return el("div", el("dt", name), el("dd", String(value)));
}

async function removeChannel(name, changed) {
  if (!(await confirmed(`Stop watching ${name}?`, "Its open alerts end. What was found stays.", "Remove"))) return;
  try {
    await send("DELETE", `channels/${part(name)}`);
    toast(`${name} is no longer watched.`);
    changed();
  } catch (error) {
    toast(error.message, "error");
  }
}

function addChannel() {
  const found = el("p.hint", { role: "status" });
  const url = el("input", {
    name: "url",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "https://…/live.m3u8",
  });
  const test = button("Test this address", {}, async () => {
    test.disabled = true;
    found.textContent = "Watching it for some seconds…";
    try {
      found.textContent = describeTest(await send("POST", "channels/test", { url: url.value }));
    } catch (error) {
      found.textContent = error.message;
    }
    test.disabled = false;
  });
  formDialog(
    "Add a channel",
    "It is written to the configuration and watched at once.",
    [
      field(
        "Name",
        el("input", {
          name: "name",
          required: true,
          pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]*",
          autocomplete: "off",
          placeholder: "channel-5",
        }),
        "Letters, digits, dot, dash, underscore.",
      ),
      field("Address", url, "HLS, MPEG-TS over HTTP or UDP, RTMP, RTSP. Credentials in it are never shown again."),
      field(
        "Sampling",
        select(
          "mode",
          [
            ["auto", "auto"],
            ["exact", "exact: decode everything"],
            ["economy", "economy: key frames only"],
          ],
          "auto",
        ),
      ),
      el("div.row", test),
      found,
    ],
    "Add",
    async (values) => {
      await send("POST", "channels", values);
      toast(`${values.name} is being opened.`);
    },
  );
}

/** What a test of an address found, as one line: every value that it has, under its own name. */
function describeTest(found) {
  return Object.entries(found)
    .filter(([, value]) => ["string", "number"].includes(typeof value))
    .map(([name, value]) => `${name.replace(/_s$/, " (s)").replaceAll("_", " ")}: ${value}`)
    .join(" · ");
}
