// The Live page: one tile per channel, those that need attention first.

import { address, all, can, part, send } from "./api.js";
import { button, askToConfirm, el, empty, field, formDialog, icon, put, select, toast } from "./dom.js";
import { ALERTS, on } from "./events.js";
import { clock, length, moment } from "./times.js";

const REFRESH_MS = 5000;
// Sorted by need for attention. The colour never stands alone: a text is beside it.
const STATES = {
  failed: ["Failed", "bad", "Cannot be reached or decoded"],
  denied: ["Denied", "bad", "The source denies access, has nothing there, or leads to a private address"],
  no_video: ["No video", "bad", "Audio without video"],
  stalled: ["Stalled", "bad", "No new frames; reconnecting"],
  impaired: ["Impaired", "warn", "Black, flat or frozen for a minute"],
  starting: ["Starting", "idle", "No frame received yet"],
  ended: ["Ended", "idle", "The recording was read to its end"],
  up: ["On air", "good", "Received and matched"],
};

// Causes that have a name of their own: a 404 denies nothing.
const CAUSES = { missing: "Not found" };

export function describeState(state) {
  return STATES[state] ?? [state, "idle", ""];
}

/** The reason that the monitor gives, as a sentence; what the state means where it gives none. */
function explainState(channel, meaning) {
  const reason = channel.reason ?? "";
  return !reason ? meaning : reason.includes("://") ? reason : reason[0].toUpperCase() + reason.slice(1);
}

export async function show(root, { signal }) {
  const grid = el("div.tiles");
  const summary = el("p.lead");
  put(
    root,
    el(
      "div.head",
      el("div", el("h1", "Live"), summary),
      can("write") && button("Add a channel", { iconName: "plus" }, addChannel),
    ),
    grid,
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
        grid,
        empty(
          "No channel is monitored yet",
          ["Test an address and add it; it appears here without a restart."],
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
      if (!tiles.has(channel.name)) tiles.set(channel.name, new Tile(channel.name, load));
      tiles.get(channel.name).draw(channel, open);
    }
    const sorted = channels.map((channel) => tiles.get(channel.name).element);
    // Moved only if the order changed: a moved tile loses its focus.
    if (sorted.some((tile, at) => grid.children[at] !== tile) || grid.children.length !== sorted.length)
      put(grid, sorted);
  };
  const load = async () => {
    const [found, alerts] = await Promise.all([
      all("channels", {}, 1000, signal),
      all("alerts", { status: "open" }, 1000, signal),
    ]);
    channels = found;
    open = new Map(alerts.map((alert) => [alert.id, alert]));
    draw();
  };
  const reload = () => load().catch(() => {}); // the banner says that the connection is lost

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
  on(["reconnected"], reload, signal);
  const timer = setInterval(() => document.hidden || reload(), REFRESH_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
  await load();
}

function summarise(channels, open) {
  if (!channels.length) return "";
  const bad = channels.filter((channel) => ["bad", "warn"].includes(describeState(channel.state)[1])).length;
  const facts = [`${channels.length} ${channels.length === 1 ? "channel" : "channels"}`];
  facts.push(bad ? `${bad} ${bad === 1 ? "needs" : "need"} attention` : "all OK");
  facts.push(open.size ? `${open.size} ${open.size === 1 ? "copy" : "copies"} on air now` : "no copy on air");
  return facts.join(" · ");
}

class Tile {
  constructor(name, onChange) {
    this.name = name;
    this.picture = el("img", { alt: `Latest frame of ${name}`, width: 320, height: 180, hidden: true });
    this.placeholder = el("span.placeholder", "No picture yet");
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
          onclick: () => removeChannel(name, onChange),
        },
        icon("trash"),
      );
    this.element = el(
      "article.tile",
      { "aria-label": name, tabindex: 0 },
      el("div.screen", this.picture, this.placeholder, this.state, this.ribbon),
      el("div.body", el("div.row.between", el("h2", name), remove), this.since, this.facts),
    );
  }

  draw(channel, open) {
    const [label, tone, meaning] = describeState(channel.state);
    this.element.dataset.tone = tone;
    put(this.state, el("span.shape", { "aria-hidden": "true" }), CAUSES[channel.cause] ?? label);
    this.state.dataset.tone = tone;
    this.state.title = meaning;
    put(this.since, explainState(channel, meaning), " · since ", moment(channel.since));
    put(
      this.facts,
      fact("Lag", channel.lag_s === null ? "–" : `${channel.lag_s.toFixed(1)} s`),
      fact("Reconnects", channel.reconnects),
      fact("Missing", length(channel.gap_seconds)),
      fact("Dropped", channel.dropped),
    );
    const own = [...open.values()].filter((alert) => alert.channel === channel.name);
    put(
      this.ribbon,
      own.map((alert) =>
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
      own.some((alert) => !alert.licence),
    );
    this.refresh(channel);
  }

  /** Shows the latest frame once it is fully loaded, so that nothing flickers. */
  async refresh(channel) {
    if (this.loading || this.frameAt === channel.last_second_at || !channel.last_second_at) return;
    this.loading = true;
    const next = new Image();
    next.src = address(`channels/${part(this.name)}/thumbnail`, { at: channel.last_second_at });
    try {
      await next.decode();
      this.picture.src = next.src;
      this.picture.hidden = false;
      this.placeholder.hidden = true;
      this.frameAt = channel.last_second_at;
    } catch {
      // none yet: the placeholder stays
    }
    this.loading = false;
  }
}

function fact(name, value) {
  return el("div", el("dt", name), el("dd", String(value)));
}

async function removeChannel(name, onChange) {
  if (!(await askToConfirm(`Stop monitoring ${name}?`, "Its open alerts end; past alerts are retained.", "Remove")))
    return;
  try {
    await send("DELETE", `channels/${part(name)}`);
    toast(`${name} is no longer monitored.`);
    onChange();
  } catch (error) {
    toast(error.message, "error");
  }
}

function addChannel() {
  const result = el("p.hint", { role: "status" });
  const url = el("input", {
    name: "url",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "https://…/live.m3u8",
  });
  const isPrivate = el("input", { type: "checkbox", name: "private" });
  const test = button("Test this address", {}, async () => {
    test.disabled = true;
    result.textContent = "Testing it for a few seconds…";
    try {
      result.textContent = describeTest(await send("POST", "channels/test", { url: url.value, private: isPrivate.checked }));
    } catch (error) {
      result.textContent = error.message;
    }
    test.disabled = false;
  });
  formDialog(
    "Add a channel",
    "It is added to the configuration file, and monitoring starts at once.",
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
      can("admin") && el("label.check", isPrivate, "Its host name has a private address"),
      el("div.row", test),
      result,
    ],
    "Add",
    async (values) => {
      await send("POST", "channels", { ...values, private: isPrivate.checked });
      toast(`${values.name} is being opened.`);
    },
  );
}

/** The result of a test as one line: every value under its own name. */
function describeTest(result) {
  return Object.entries(result)
    .filter(([, value]) => ["string", "number"].includes(typeof value))
    .map(([name, value]) => `${name.replace(/_s$/, " (s)").replaceAll("_", " ")}: ${value}`)
    .join(" · ");
}
