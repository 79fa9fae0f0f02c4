// The selected alerts, and the bar that reviews all of them together.

import { send } from "./api.js";
import { button, el, put, toast } from "./dom.js";

const MAX_PER_REQUEST = 200; // by the API

export class Selection {
  #cards;
  #selected = new Set();
  #count = el("strong", { role: "status" });

  /** `cards` maps ids to cards; `decisions` are [name, label, done, letter]. */
  constructor(cards, decisions) {
    this.#cards = cards;
    this.bar = el(
      "div.selection",
      { hidden: true, role: "group", "aria-label": "Selected alerts" },
      this.#count,
      el(
        "div.row.wrap",
        decisions.map(([decision, label, , letter]) =>
          button(
            label.split(" ")[0],
            { kind: "quiet", iconName: decision, title: `${label}, all selected (${letter})`, "aria-label": label },
            () => this.review(decision),
          ),
        ),
        button("All shown", { kind: "quiet" }, () => this.#select([...this.#cards.keys()])),
        button("None", { kind: "quiet" }, () => this.clear()),
      ),
    );
  }

  get size() {
    return this.#selected.size;
  }

  has(id) {
    return this.#selected.has(id);
  }

  toggle(id) {
    if (!this.#selected.delete(id)) this.#selected.add(id);
    this.#draw();
  }

  clear() {
    this.#select([]);
  }

  /** Sends one decision for all selected alerts. */
  async review(decision) {
    const ids = [...this.#selected];
    try {
      for (let at = 0; at < ids.length; at += MAX_PER_REQUEST) {
        const { items } = await send("POST", "alerts/review", { ids: ids.slice(at, at + MAX_PER_REQUEST), decision });
        for (const alert of items) this.#cards.get(alert.id)?.draw(alert);
      }
      toast(`${ids.length} ${ids.length === 1 ? "alert" : "alerts"} reviewed.`);
      this.clear();
    } catch (error) {
      toast(error.message, "error");
    }
  }

  #select(ids) {
    this.#selected = new Set(ids);
    this.#draw();
  }

  #draw() {
    for (const [id, card] of this.#cards) card.select(this.#selected.has(id));
    this.bar.hidden = !this.#selected.size;
    put(this.#count, `${this.#selected.size} selected`);
  }
}
