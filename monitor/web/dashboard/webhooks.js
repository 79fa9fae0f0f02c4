// Webhooks: who is told, the log of deliveries, and sending one again.

import { all, get, part, send } from "./api.js";
import { button, confirmed, el, field, formDialog, put, table, toast } from "./dom.js";
import { moment } from "./times.js";

const TYPES = [
  "alert.started",
  "alert.updated",
  "alert.ended",
  "alert.retracted",
  "alert.reviewed",
  "channel.down",
  "channel.up",
];

export async function webhooks(panel, signal) {
  const list = el("div.stack");
  const draw = async () => {
    const hooks = await all("webhooks", {}, 200, signal);
    put(
      list,
      hooks.length
        ? hooks.map((hook) => hookView(hook, draw))
        : el(
            "p.muted",
            "Nobody is told yet. Each delivery is signed (Standard Webhooks), tried again, and logged here.",
          ),
    );
  };
  put(
    panel,
    el(
      "div.row.between.wrap",
      el("h2", "Webhooks"),
      button("Add a webhook", { sign: "plus" }, () => addHook(draw)),
    ),
    list,
  );
  await draw();
}

function hookView(hook, draw) {
  const log = el("div");
  const attempt = async (work, words) => {
    try {
      await work();
      toast(words);
      await draw();
    } catch (error) {
      toast(error.message, "error");
    }
  };
  const path = `webhooks/${part(hook.id)}`;
  const details = el("details.hook-log", el("summary", "Deliveries"), log);
  details.addEventListener("toggle", () => details.open && drawLog(log, path));
  const test = async () => {
    try {
      const sent = await send("POST", `${path}/test`);
      if (sent.state === "done") toast(`It was taken, with ${sent.last_status}.`);
      else toast(`It was not taken: ${sent.last_error ?? sent.last_status}.`, "error");
      details.open = true;
      await drawLog(log, path);
    } catch (error) {
      toast(error.message, "error");
    }
  };
  const rotate = async () => {
    const sentence = "Its messages carry the signatures of both secrets for a day, so that the receiver can change over.";
    if (!(await confirmed("Give it a new secret?", sentence, "New secret"))) return;
    try {
      const { secret } = await send("POST", `${path}/rotate`);
      await draw();
      showSecret(secret);
    } catch (error) {
      toast(error.message, "error");
    }
  };
  return el(
    "article.hook",
    el(
      "div.row.between.wrap",
      el("strong.address", hook.url),
      el(
        "span.chip",
        { data: { tone: hook.enabled ? "good" : "bad" } },
        hook.enabled ? "On" : `Off${hook.disabled_reason ? `: ${hook.disabled_reason}` : ""}`,
      ),
    ),
    el(
      "p.muted.small",
      hook.types?.length ? hook.types.join(", ") : "all events",
      " · since ",
      moment(hook.created_at),
      hook.old_secret_until && [" · its old secret signs too until ", moment(hook.old_secret_until)],
    ),
    el(
      "div.row.wrap",
      button("Send a test", { kind: "quiet" }, test),
      !hook.enabled &&
        button("Switch on", { kind: "quiet" }, () => attempt(() => send("POST", `${path}/enable`), "It is on again.")),
      button("New secret", { kind: "quiet" }, rotate),
      button("Remove", { kind: "quiet", sign: "trash" }, async () => {
        if (
          await confirmed(
            "Remove this webhook?",
            `${hook.url} is told nothing more; what waits for it is given up.`,
            "Remove",
          )
        )
          await attempt(() => send("DELETE", path), "It is removed.");
      }),
    ),
    details,
  );
}

async function drawLog(log, path) {
  const states = { done: ["Delivered", "good"], failed: ["Given up", "bad"], waiting: ["Waiting", "warn"] };
  const { items } = await get(`${path}/deliveries`, { limit: 50 });
  const again = async (one) => {
    try {
      await send("POST", `${path}/deliveries/${part(one.id)}/replay`);
      toast("It is sent again.");
      await drawLog(log, path);
    } catch (error) {
      toast(error.message, "error");
    }
  };
  const row = (one) => [
    moment(one.created_at),
    one.alert ? el("a", { href: `#/alerts/${part(one.alert)}` }, one.event) : one.event,
    el("span.chip", { data: { tone: states[one.state]?.[1] ?? "idle" } }, states[one.state]?.[0] ?? one.state),
    String(one.tries),
    [one.last_status, one.last_error].filter(Boolean).join(" ") || "–",
    button("Replay", { kind: "quiet" }, () => again(one)),
  ];
  put(
    log,
    items.length
      ? table(["When", "Event", "State", "Tries", "Answer", ""], items.map(row))
      : el("p.muted", "Nothing was sent yet."),
  );
}

function addHook(draw) {
  const types = el(
    "fieldset.row.wrap",
    el("legend", "Events"),
    TYPES.map((type) =>
      el("label.check", el("input", { type: "checkbox", name: type, checked: type !== "alert.updated" }), type),
    ),
  );
  formDialog(
    "Webhook",
    "Each event is posted to this address, signed with a secret that is shown once.",
    [
      field(
        "Address",
        el("input", { name: "url", type: "url", required: true, placeholder: "https://example.org/hook" }),
      ),
      types,
    ],
    "Add",
    async ({ url, ...chosen }) => {
      const { secret } = await send("POST", "webhooks", { url, types: TYPES.filter((type) => type in chosen) });
      await draw();
      showSecret(secret);
    },
  );
}

function showSecret(secret) {
  const dialog = el(
    "dialog.dialog",
    { "aria-labelledby": "secret-title" },
    el(
      "form",
      { method: "dialog" },
      el("h2", { id: "secret-title" }, "Its secret"),
      el("p", "Keep it now: it is not shown again. The receiver checks signatures with it."),
      el("pre.commands", el("code", secret)),
      el("div.row.end", el("button.button.primary", "I have it")),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
