// The REST API, and nothing else: every byte that the dashboard shows comes from here. Answers to 401 with the
// login box and then asks again; other errors are thrown as ApiError with the server's own sentence.

import { el } from "./dom.js";

const BASE = new URL("api/v1/", new URL(".", document.baseURI));
const RANK = { read: 1, write: 2, admin: 3 };

export let session = { name: "", scopes: [] };

export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The server answered with ${status}.`);
    this.status = status;
  }
}

/** The address of a resource; a part that comes from data is encoded. */
export function address(path, query = {}) {
  const url = new URL(path, BASE);
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
  }
  return url;
}

/** A part of a path. */
export const part = encodeURIComponent;

async function problemOf(reply) {
  try {
    return await reply.json();
  } catch {
    return {};
  }
}

/** A reply that is well, after a login where one was needed. */
export async function ask(path, { method = "GET", query, body, headers, signal } = {}) {
  const options = { method, signal, headers: { ...headers }, credentials: "same-origin", cache: "no-store" };
  if (method !== "GET") options.headers["X-Copywatch"] = "1";
  if (body instanceof FormData) options.body = body;
  else if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  for (;;) {
    const reply = await fetch(address(path, query), options);
    if (reply.ok) return reply;
    if (reply.status !== 401) throw new ApiError(reply.status, await problemOf(reply));
    await login((await problemOf(reply)).detail);
  }
}

export async function get(path, query, signal) {
  return (await ask(path, { query, signal })).json();
}

export async function send(method, path, body) {
  const reply = await ask(path, { method, body });
  return reply.status === 204 ? null : reply.json();
}

/** All pages of a list, up to `most` items. */
export async function all(path, query, most = 1000, signal) {
  const items = [];
  let cursor;
  do {
    const page = await get(path, { limit: 200, ...query, cursor }, signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < most);
  return items;
}

/** Sends a form and tells how much of it has gone; fetch cannot say that. */
export function upload(path, form, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", address(path));
    request.setRequestHeader("X-Copywatch", "1");
    request.responseType = "json";
    request.upload.addEventListener(
      "progress",
      (event) => event.lengthComputable && progress(event.loaded, event.total),
    );
    request.addEventListener("load", () => {
      if (request.status < 300) resolve(request.response);
      else reject(new ApiError(request.status, request.response ?? {}));
    });
    request.addEventListener("error", () => reject(new Error("The connection was lost during the upload; try again.")));
    request.send(form);
  });
}

export function can(scope) {
  return session.scopes.some((mine) => RANK[mine] >= RANK[scope]);
}

/** Asks who is looking; shows the login box where that must be said first. */
export async function begin() {
  session = await get("session");
  return session;
}

let open = null; // one login box for all requests that wait for it

function login(sentence) {
  open ??= new Promise((resolve) => {
    const token = el("input", {
      type: "password",
      name: "token",
      autocomplete: "current-password",
      required: true,
      autofocus: true,
      placeholder: "cw_…",
    });
    const problem = el("p.problem", { role: "alert", hidden: true });
    const form = el(
      "form.stack",
      el("h2", { id: "login-title" }, "Log in"),
      el("p", sentence || "This server wants a token."),
      el("label.field", el("span.label", "Token"), token),
      problem,
      el("p.hint", "One is made by ", el("code", "copywatch tokens add NAME --scope read"), "."),
      el("div.row.end", el("button.button.primary", { type: "submit" }, "Log in")),
    );
    const dialog = el(
      "dialog.dialog",
      { "aria-labelledby": "login-title", oncancel: (event) => event.preventDefault() },
      form,
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const reply = await fetch(address("session"), {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Copywatch": "1" },
        body: JSON.stringify({ token: token.value.trim() }),
      });
      if (reply.ok) {
        dialog.remove();
        open = null;
        resolve();
      } else {
        problem.textContent = (await problemOf(reply)).detail || "That token was not taken.";
        problem.hidden = false;
        token.select();
      }
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return open;
}
