// The REST API: everything that the dashboard shows comes from here. On 401 it shows the login box and then sends the
// request again; other errors are thrown as ApiError with the server's own sentence.

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

/** The address of a resource; empty query values are left out. */
export function address(path, query = {}) {
  const url = new URL(path, BASE);
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
  }
  return url;
}

/** Encodes a value as one part of a path. */
export const part = encodeURIComponent;

async function problemOf(reply) {
  try {
    return await reply.json();
  } catch {
    return {};
  }
}

/** The reply to a successful request, after a login if one was needed. */
export async function request(path, { method = "GET", query, body, headers, signal } = {}) {
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
  return (await request(path, { query, signal })).json();
}

export async function send(method, path, body) {
  const reply = await request(path, { method, body });
  return reply.status === 204 ? null : reply.json();
}

/** All pages of a list, until there are at least `maxItems` items. */
export async function all(path, query, maxItems = 1000, signal) {
  const items = [];
  let cursor;
  do {
    const page = await get(path, { limit: 200, ...query, cursor }, signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < maxItems);
  return items;
}

/** Sends a form and reports its progress, which fetch cannot. */
export function upload(path, form, progress) {
  return new Promise((resolve, reject) => {
    const xhr = new XMLHttpRequest();
    xhr.open("POST", address(path));
    xhr.setRequestHeader("X-Copywatch", "1");
    xhr.responseType = "json";
    xhr.upload.addEventListener("progress", (event) => event.lengthComputable && progress(event.loaded, event.total));
    xhr.addEventListener("load", () => {
      if (xhr.status < 300) resolve(xhr.response);
      else reject(new ApiError(xhr.status, xhr.response ?? {}));
    });
    xhr.addEventListener("error", () => reject(new Error("The connection was lost during the upload; try again.")));
    xhr.send(form);
  });
}

export function can(scope) {
  return session.scopes.some((one) => RANK[one] >= RANK[scope]);
}

function postSession(token) {
  return fetch(address("session"), {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Copywatch": "1" },
    body: JSON.stringify({ token }),
  });
}

/** Logs in by the link that `serve` prints, and removes its secret from the address; whether this was such a link. */
export async function logInByLink() {
  const secret = /^#secret=(.+)$/.exec(location.hash)?.[1];
  if (!secret) return false;
  history.replaceState(null, "", `${location.pathname}${location.search}#/live`);
  await postSession(decodeURIComponent(secret)); // if it fails, the login box says why
  return true;
}

/** Loads name and scopes of the viewer; shows the login box if a token is needed. */
export async function loadSession() {
  session = await get("session");
  return session;
}

let pendingLogin = null; // one login box for all requests that wait for it

function login(sentence) {
  pendingLogin ??= new Promise((resolve) => {
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
      el("p", sentence || "This server requires a token."),
      el("label.field", el("span.label", "Token"), token),
      problem,
      el("p.hint", "Create one with ", el("code", "copywatch tokens add NAME --scope read"), "."),
      el("div.row.end", el("button.button.primary", { type: "submit" }, "Log in")),
    );
    const dialog = el(
      "dialog.dialog",
      { "aria-labelledby": "login-title", oncancel: (event) => event.preventDefault() },
      form,
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const reply = await postSession(token.value.trim());
      if (reply.ok) {
        dialog.remove();
        pendingLogin = null;
        resolve();
      } else {
        problem.textContent = (await problemOf(reply)).detail || "The token was not accepted.";
        problem.hidden = false;
        token.select();
      }
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return pendingLogin;
}
