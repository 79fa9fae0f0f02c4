// Webhooks: their list, the log of deliveries, test, replay, new secrets.

import { all, get, part, send } from "./api.js";
import { button, askToConfirm, el, field, formDialog, put, table, toast } from "./dom.js";
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
            "No webhook yet. Each delivery is signed (Standard Webhooks), retried on failure, and logged here.",
          ),
    );
  };
  put(
    panel,
    el(
      "div.row.between.wrap",
      el("h2", "Webhooks"),
      button("Add a webhook", { iconName: "plus" }, () => addHook(draw)),
    ),
    list,
  );
  await draw();
}

function hookView(hook, draw) {
  const log = el("div");
  const run = async (work, message) => {
    try {
      await work();
      toast(message);
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
      if (sent.state === "done") toast(`Delivered with status ${sent.last_status}.`);
      else toast(`Not delivered: ${sent.last_error ?? sent.last_status}.`, "error");
      details.open = true;
      await drawLog(log, path);
    } catch (error) {
      toast(error.message, "error");
    }
  };
  const rotate = async () => {
    const sentence = "For a day its messages carry the signatures of both secrets, so that the receiver can switch.";
    if (!(await askToConfirm("Create a new secret?", sentence, "New secret"))) return;
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
        hook.enabled ? "Enabled" : `Disabled${hook.disabled_reason ? `: ${hook.disabled_reason}` : ""}`,
      ),
    ),
    el(
      "p.muted.small",
      hook.types?.length ? hook.types.join(", ") : "all events",
      " · since ",
      moment(hook.created_at),
      hook.old_secret_until && [" · the old secret is valid until ", moment(hook.old_secret_until)],
    ),
    el(
      "div.row.wrap",
      button("Send a test", { kind: "quiet" }, test),
      !hook.enabled &&
        button("Enable", { kind: "quiet" }, () => run(() => send("POST", `${path}/enable`), "The webhook is enabled.")),
      button("New secret", { kind: "quiet" }, rotate),
      button("Remove", { kind: "quiet", iconName: "trash" }, async () => {
        if (
          await askToConfirm(
            "Remove this webhook?",
            `No more events are sent to ${hook.url}; queued deliveries are deleted.`,
            "Remove",
          )
        )
          await run(() => send("DELETE", path), "The webhook is removed.");
      }),
    ),
    details,
  );
}

async function drawLog(log, path) {
  const states = { done: ["Delivered", "good"], failed: ["Failed", "bad"], waiting: ["Queued", "warn"] };
  const { items } = await get(`${path}/deliveries`, { limit: 50 });
  const replay = async (one) => {
    try {
      await send("POST", `${path}/deliveries/${part(one.id)}/replay`);
      toast("The delivery is queued again.");
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
    button("Replay", { kind: "quiet" }, () => replay(one)),
  ];
  put(
    log,
    items.length
      ? table(["Created", "Event", "State", "Attempts", "Response", ""], items.map(row))
      : el("p.muted", "Nothing has been sent yet."),
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
    "Each event is sent to this address by POST, signed with a secret that is shown once.",
    [
      field(
        "Address",
        el("input", { name: "url", type: "url", required: true, placeholder: "https://example.org/hook" }),
      ),
      types,
    ],
    "Add",
    async ({ url, ...checked }) => {
      const { secret } = await send("POST", "webhooks", { url, types: TYPES.filter((type) => type in checked) });
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
      el("h2", { id: "secret-title" }, "Webhook secret"),
      el("p", "Save it now: it is not shown again. The receiver verifies signatures with it."),
      el("pre.commands", el("code", secret)),
      el("div.row.end", el("button.button.primary", "I saved it")),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
