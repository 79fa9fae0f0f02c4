// Many alerts at once: which cards are chosen, and the bar that says the same of all of them.

import { send } from "./api.js";
import { button, el, put, toast } from "./dom.js";

const AT_ONCE = 200; // by the API

export class Selection {
  #cards;
  #chosen = new Set();
  #count = el("strong", { role: "status" });

  /** `cards` maps ids to cards; `decisions` are [name, words, done, letter]. */
  constructor(cards, decisions) {
    this.#cards = cards;
    this.bar = el(
      "div.selection",
      { hidden: true, role: "group", "aria-label": "Alerts that are chosen" },
      this.#count,
      el(
        "div.row.wrap",
        decisions.map(([decision, words, , letter]) =>
          button(
            words.split(" ")[0],
            { kind: "quiet", sign: decision, title: `${words}, all of them (${letter})`, "aria-label": words },
            () => this.review(decision),
          ),
        ),
        button("All shown", { kind: "quiet" }, () => this.#choose([...this.#cards.keys()])),
        button("None", { kind: "quiet" }, () => this.clear()),
      ),
    );
  }

  get size() {
    return this.#chosen.size;
  }

  has(id) {
    return this.#chosen.has(id);
  }

  toggle(id) {
    if (!this.#chosen.delete(id)) this.#chosen.add(id);
    this.#draw();
  }

  clear() {
    this.#choose([]);
  }

  /** Says this of all that are chosen. */
  async review(decision) {
    const ids = [...this.#chosen];
    try {
      for (let at = 0; at < ids.length; at += AT_ONCE) {
        const { items } = await send("POST", "alerts/review", { ids: ids.slice(at, at + AT_ONCE), decision });
        for (const alert of items) this.#cards.get(alert.id)?.draw(alert);
      }
      toast(`${ids.length} ${ids.length === 1 ? "alert is" : "alerts are"} reviewed.`);
      this.clear();
    } catch (error) {
      toast(error.message, "error");
    }
  }

  #choose(ids) {
    this.#chosen = new Set(ids);
    this.#draw();
  }

  #draw() {
    for (const [id, card] of this.#cards) card.choose(this.#chosen.has(id));
    this.bar.hidden = !this.#chosen.size;
    put(this.#count, `${this.#chosen.size} chosen`);
  }
}
