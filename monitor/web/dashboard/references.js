// References: upload with progress, import of features, quality reports, excluded spans, removal.

import { address, can, get, part, send, upload } from "./api.js";
import { button, askToConfirm, el, empty, field, icon, put, toast } from "./dom.js";
import { on } from "./events.js";
import { bytes, clock, length, moment } from "./times.js";

const PAGE = 50,
  STRIP = 10,
  JOB_MS = 700;

export async function show(root, { query, signal }) {
  const list = el("div.refs"),
    jobs = el("div.jobs", { "aria-live": "polite" }),
    count = el("p.lead");
  const more = button("Show more", {}, () => load());
  const search = el("input", {
    type: "search",
    name: "q",
    "aria-label": "Search",
    placeholder: "Search title, owner or id",
    value: query.get("q") ?? "",
  });
  let cursor = null,
    nShown = 0,
    rows = new Map(); // by id: a reference as last loaded, and its row

  /** The reference's row; while the reference is unchanged, the existing one, which may be open or half filled in. */
  const rowOf = (reference, before, isOnly) => {
    const json = JSON.stringify(reference),
      old = before.get(reference.id);
    const box = old?.json === json ? old.box : row(reference, () => load(true), isOnly || Boolean(old?.box.open));
    rows.set(reference.id, { json, box });
    return box;
  };
  const load = async (fresh = false) => {
    const page = await get(
      "references",
      { q: search.value.trim(), limit: PAGE, cursor: fresh ? null : cursor },
      signal,
    );
    const before = rows,
      isOnly = page.items.length === 1 && Boolean(search.value);
    if (fresh) {
      put(list);
      rows = new Map();
      nShown = 0;
    }
    list.append(...page.items.map((reference) => rowOf(reference, before, isOnly)));
    nShown += page.items.length;
    cursor = page.next;
    more.hidden = !cursor;
    count.textContent = nShown ? `${nShown}${cursor ? "+" : ""} ${nShown === 1 ? "video" : "videos"} registered` : "";
    if (!nShown)
      put(
        list,
        search.value
          ? empty("No reference matches", ["Search for a part of its title, owner or id."])
          : empty(
              "No reference is registered yet",
              [
                "Upload a video above, or register local files and folders. An owner can also create features elsewhere and share only those.",
              ],
              [
                'copywatch refs add film.mp4 --title "The Film" --owner "ACME"',
                "copywatch refs add films/",
                "copywatch refs import film-42.copywatch",
              ],
            ),
      );
  };
  let typing;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => load(true), 250);
  });
  on(["reference", "reconnected"], () => load(true).catch(() => {}), signal);
  put(
    root,
    el("div.head", el("div", el("h1", "References"), count), search),
    can("write") && uploader(jobs, () => load(true), signal),
    jobs,
    list,
    el("div.row.centre", more),
  );
  await load(true);
  for (const job of (await get("jobs", { limit: 20 }, signal)).items.filter((one) =>
    ["waiting", "running"].includes(one.state),
  ))
    trackJob(jobs, job, () => load(true), signal);
}

function uploader(jobs, onDone, signal) {
  const file = el("input", {
    type: "file",
    name: "file",
    required: true,
    class: "visually-hidden",
    id: "file",
    accept: "video/*,.ts,.mkv,.copywatch",
  });
  const fileLabel = el("span.muted", "or drop one here");
  const form = el(
    "form.upload",
    { "aria-label": "Register a video" },
    el("div.drop", file, el("label.button", { for: "file" }, icon("upload"), el("span", "Choose a video")), fileLabel),
    field("Title", el("input", { name: "title", maxlength: 1000, placeholder: "default: the file name" })),
    field("Owner", el("input", { name: "owner", maxlength: 1000 })),
    el("button.button.primary", { type: "submit" }, "Register"),
    el(
      "p.hint",
      "The video is decoded once; only features and two thumbnails per second are stored. A file written by ",
      el("code", "copywatch refs export"),
      " (.copywatch) is imported directly.",
    ),
  );
  const showFileName = () =>
    (fileLabel.textContent = file.files.length
      ? `${file.files[0].name}, ${bytes(file.files[0].size)}`
      : "or drop one here");
  file.addEventListener("change", showFileName);
  form.addEventListener("dragover", (event) => {
    event.preventDefault();
    form.classList.add("over");
  });
  form.addEventListener("dragleave", () => form.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("over");
    if (event.dataTransfer.files.length) {
      file.files = event.dataTransfer.files;
      showFileName();
    }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const values = new FormData(form),
      video = file.files[0];
    for (const key of ["title", "owner"]) if (!values.get(key)) values.delete(key);
    const isExport = video.name.endsWith(".copywatch");
    if (isExport) for (const key of ["title", "owner"]) values.delete(key);
    const line = progressLine(video.name);
    jobs.prepend(line.element);
    form.reset();
    showFileName();
    try {
      const reply = await upload(isExport ? "references/import" : "references", values, (sent, total) =>
        line.update(sent, total, `sent ${bytes(sent)} of ${bytes(total)}`),
      );
      line.element.remove();
      const job = reply.job ?? (reply.kind ? reply : null); // a small import finishes within the request
      if (job) trackJob(jobs, job, onDone, signal, video.name);
      else {
        toast(`${video.name} is imported.`);
        onDone();
      }
    } catch (error) {
      line.fail(error.message);
    }
  });
  return form;
}

function progressLine(name) {
  const bar = el("progress", { max: 1 }),
    status = el("span.muted");
  const element = el("div.job", el("strong", name), bar, status);
  return {
    element,
    update(done, total, sentence) {
      if (total) bar.value = done / total;
      status.textContent = sentence;
    },
    fail(sentence) {
      bar.remove();
      status.className = "problem";
      status.textContent = sentence;
      element.append(button("Dismiss", { kind: "quiet" }, () => element.remove()));
    },
  };
}

/** Shows a job until it is done. */
async function trackJob(jobs, first, onDone, signal, name) {
  const id = typeof first === "string" ? first : first.id;
  const line = progressLine(name ?? first.message ?? id);
  jobs.prepend(line.element);
  while (!signal.aborted) {
    let job;
    try {
      job = await get(`jobs/${part(id)}`, {}, signal);
    } catch (error) {
      line.fail(error.message);
      return;
    }
    if (job.state === "failed") {
      line.fail(job.message);
      return;
    }
    if (job.state === "done") {
      line.element.remove();
      if (job.kind === "remove") toast(`${job.result?.reference ?? "The reference"} is removed.`);
      else toast(`${name ?? "The video"} is registered.`);
      onDone();
      return;
    }
    const seconds = job.total_s ? `${clock(job.done_s)} of ${clock(job.total_s)} read` : `${clock(job.done_s)} read`;
    line.update(job.done_s, job.total_s, job.state === "waiting" ? "queued" : seconds);
    await new Promise((resolve) => setTimeout(resolve, JOB_MS));
  }
}

function row(reference, onChange, isOpen) {
  const detail = el("div.ref-detail");
  const warnings = reference.warnings ?? [];
  const box = el(
    "details.ref",
    { open: isOpen },
    el(
      "summary",
      reference.has_thumbnails
        ? el("img", {
            src: picture(reference, Math.floor(reference.seconds / 3)),
            alt: "",
            width: 96,
            height: 54,
            loading: "lazy",
          })
        : el("span.placeholder.small", "no pictures"),
      el(
        "span.ref-name",
        el("strong", reference.title || reference.id),
        el("span.muted", [reference.id, reference.owner].filter(Boolean).join(" · ")),
      ),
      el(
        "span.ref-facts",
        el("span", length(reference.seconds), " "),
        reference.added_at && el("span.muted", "since ", moment(reference.added_at)),
      ),
      el(
        "span.chips",
        reference.state === "ready"
          ? el("span.chip", { data: { tone: "good" } }, "Ready")
          : el("span.chip", { data: { tone: "bad" } }, "Quarantined: not searched"),
        warnings.length > 0 &&
          el(
            "span.chip",
            { data: { tone: "warn" } },
            icon("warning"),
            `${warnings.length} ${warnings.length === 1 ? "warning" : "warnings"}`,
          ),
      ),
    ),
    detail,
  );
  const draw = () =>
    box.open &&
    !detail.childElementCount &&
    drawDetail(detail, reference, onChange).catch((error) => put(detail, el("p.problem", error.message)));
  box.addEventListener("toggle", draw);
  if (isOpen) draw();
  return box;
}

const picture = (reference, second) => address(`references/${part(reference.id)}/thumbnails/${second}`);

async function drawDetail(detail, reference, onChange) {
  // Only the single reference reports overlaps with other references.
  const [report, { items }] = await Promise.all([
    get(`references/${part(reference.id)}`),
    get(`references/${part(reference.id)}/exclusions`, { limit: 200 }),
  ]);
  const redraw = () => drawDetail(detail, reference, onChange);
  const tags = Object.entries(reference.tags ?? {}).map(([key, value]) => `${key}=${value}`);
  put(
    detail,
    quality(report),
    strip(reference, items),
    exclusions(reference, items, redraw),
    tags.length > 0 && el("p.muted", `Tags: ${tags.join(", ")}`),
    el(
      "div.row.wrap",
      el("a.button.quiet", { href: `#/alerts?reference=${part(reference.id)}` }, "Its alerts"),
      el(
        "a.button.quiet",
        { href: address(`references/${part(reference.id)}/export`), download: `${reference.id}.copywatch` },
        icon("download"),
        "Features",
      ),
      can("write") && button("Remove", { kind: "danger", iconName: "trash" }, () => remove(reference, onChange)),
    ),
  );
}

function quality(reference) {
  const share = Math.round(100 * (reference.low_information_share ?? 0));
  return el(
    "div",
    el("h3", "How well it can be recognised"),
    reference.warnings?.length
      ? el(
          "ul.warnings",
          reference.warnings.map((warning) => el("li", icon("warning"), warning)),
        )
      : el("p", "No problems found."),
    el(
      "p.muted.small",
      `${share} % of its seconds are black, flat or missing`,
      reference.longest_static_s ? `; the longest still picture lasts ${length(reference.longest_static_s)}.` : ".",
      reference.shortest_findable_s && ` A clean copy is found from ${length(reference.shortest_findable_s)} on.`,
    ),
  );
}

/** Thumbnails along the reference; excluded spans are shaded. */
function strip(reference, items) {
  if (!reference.has_thumbnails)
    return el(
      "p.muted.small",
      "No thumbnails are stored: it was imported as features, or the setting registration.thumbnails is off.",
    );
  const seconds = Array.from({ length: STRIP }, (_, at) =>
    Math.min(reference.seconds - 1, Math.floor(((at + 0.5) * reference.seconds) / STRIP)),
  );
  const percent = (second) => `${(100 * second) / reference.seconds}%`;
  const shades = items.map((one) => {
    const shade = el("i.shade", { title: `excluded ${clock(one.start_s)}–${clock(one.end_s)}` });
    shade.style.left = percent(one.start_s);
    shade.style.width = percent(one.end_s - one.start_s);
    return shade;
  });
  return el(
    "div.strip",
    seconds.map((second) =>
      el("img", {
        src: picture(reference, second),
        alt: `at ${clock(second)}`,
        title: clock(second),
        width: 160,
        height: 90,
        loading: "lazy",
      }),
    ),
    shades,
  );
}

function exclusions(reference, items, redraw) {
  const problem = el("p.problem", { role: "alert", hidden: true });
  const runAndRedraw = async (work) => {
    try {
      await work();
      await redraw();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  };
  const number = (name) =>
    el("input", {
      name,
      type: "number",
      min: 0,
      max: reference.seconds,
      step: "0.1",
      required: true,
      placeholder: "seconds",
    });
  const form = el(
    "form.row.wrap.bottom",
    field("From", number("start_s")),
    field("To", number("end_s")),
    field("Note", el("input", { name: "note", placeholder: "ident, end credits" })),
    el("button.button", { type: "submit" }, "Exclude"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { start_s: start, end_s: end, note } = Object.fromEntries(new FormData(form));
    runAndRedraw(() =>
      send("POST", `references/${part(reference.id)}/exclusions`, { start_s: Number(start), end_s: Number(end), note }),
    );
  });
  return el(
    "div",
    el("h3", "Spans that never alert"),
    items.length
      ? el(
          "ul.plain-list",
          items.map((one) =>
            el(
              "li.row.between",
              el("span", `${clock(one.start_s)}–${clock(one.end_s)}`, one.note && el("span.muted", ` ${one.note}`)),
              can("write") &&
                button("Include again", { kind: "quiet" }, () =>
                  runAndRedraw(() =>
                    send("DELETE", `references/${part(reference.id)}/exclusions/${part(one.n ?? one.id)}`),
                  ),
                ),
            ),
          ),
        )
      : el("p.muted", "None."),
    can("write") && form,
    problem,
  );
}

async function remove(reference, onChange) {
  if (
    !(await askToConfirm(
      `Remove ${reference.title || reference.id}?`,
      "It is no longer searched for, and its open alerts end. Its features and thumbnails are deleted; alerts and their evidence are retained.",
      "Remove",
    ))
  )
    return;
  try {
    const job = await send("DELETE", `references/${part(reference.id)}`);
    const name = reference.title || reference.id;
    toast(job ? `${name} will be removed after the current registration.` : `${name} is removed.`);
    onChange();
  } catch (error) {
    toast(error.message, "error");
  }
}
