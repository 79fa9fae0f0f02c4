// Licences: who may play what, where and when. A licensed play is recorded and shown, never hidden.

import { all, can, part, send } from "./api.js";
import { button, askToConfirm, el, empty, field, formDialog, put, table, toast } from "./dom.js";
import { moment } from "./times.js";

export async function show(root, { signal }) {
  const list = el("div");
  const draw = async () => {
    const licences = await all("licences", {}, 1000, signal);
    if (!licences.length) {
      put(
        list,
        empty(
          "No licence is registered",
          [
            "Every copy is reported as unlicensed. A licence names a reference, an owner or a tag, a channel, and a period.",
          ],
          ["copywatch licences add --reference film-42 --channel channel-5 --until 2027-01-01T00:00:00Z"],
        ),
      );
      return;
    }
    put(
      list,
      table(
        ["For", "On channel", "From", "Until", "Note", ""],
        licences.map((licence) => [
          subject(licence),
          licence.channel === "*" ? "every channel" : licence.channel,
          licence.from ? moment(licence.from, { full: true }) : "always",
          licence.until ? moment(licence.until, { full: true }) : "for ever",
          licence.note || "–",
          can("write") && button("Remove", { kind: "quiet", iconName: "trash" }, () => remove(licence, draw)),
        ]),
      ),
    );
  };
  put(
    root,
    el(
      "div.head",
      el("div", el("h1", "Licences"), el("p.lead", "A licensed play is recorded and shown as licensed, never hidden.")),
      can("write") &&
        button("Add a licence", { iconName: "plus" }, () =>
          formDialog(
            "Licence",
            "Name a reference, an owner or a tag; empty fields match everything.",
            licenceFields({ channel: "*" }),
            "Add",
            async (values) => {
              await send("POST", "licences", licenceOf(values));
              await draw();
            },
          ),
        ),
    ),
    list,
  );
  await draw();
}

function subject(licence) {
  if (licence.reference)
    return ["reference ", el("a", { href: `#/references?q=${part(licence.reference)}` }, licence.reference)];
  if (licence.owner) return `everything of ${licence.owner}`;
  return licence.tag ? `tag ${licence.tag}` : "everything";
}

export function licenceFields({ reference = "", channel = "*" }) {
  return [
    field("Reference", el("input", { name: "reference", value: reference, autocomplete: "off" }), "Its id."),
    el(
      "div.row.wrap",
      field("or owner", el("input", { name: "owner" })),
      field("or tag", el("input", { name: "tag", placeholder: "territory=EU" })),
    ),
    field("Channel", el("input", { name: "channel", value: channel, required: true }), "* is every channel."),
    el(
      "div.row.wrap",
      field("From", el("input", { name: "from", type: "datetime-local" })),
      field("Until", el("input", { name: "until", type: "datetime-local" })),
    ),
    field("Note", el("input", { name: "note", maxlength: 500, placeholder: "contract 42" })),
  ];
}

/** The form's values for the API: empty becomes null, times of the viewer's zone become UTC. */
export function licenceOf({ reference, owner, tag, channel, from, until, note }) {
  const utc = (local) => (local ? new Date(local).toISOString().replace(/\.\d+Z$/, "Z") : null);
  return {
    reference: reference || null,
    owner: owner || null,
    tag: tag || null,
    channel,
    from: utc(from),
    until: utc(until),
    note: note || "",
  };
}

async function remove(licence, draw) {
  if (
    !(await askToConfirm(
      "Remove this licence?",
      "Past plays stay licensed; later ones are reported as copies.",
      "Remove",
    ))
  )
    return;
  try {
    await send("DELETE", `licences/${part(licence.id)}`);
    await draw();
  } catch (error) {
    toast(error.message, "error");
  }
}
