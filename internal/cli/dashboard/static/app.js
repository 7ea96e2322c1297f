// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

import { detail, gib, gpu, make, preview, resource, state } from "./draw.js";

const by = (id) => document.getElementById(id);

// The token comes in the fragment of the address, which a browser sends to no server, and is kept for this tab alone.
const inAddress = location.hash.slice(1);
if (/^[A-Z2-7]{26}$/.test(inAddress)) {
  sessionStorage.setItem("token", inAddress);
  history.replaceState(null, "", location.pathname);
}
const authorized = () => ({ Authorization: "Bearer " + (sessionStorage.getItem("token") ?? "") });

// --- What the page knows, and what it has not drawn yet ---

const cards = new Map(); // by name: {data, element, button, state, about, message, gpus}
const pending = new Map(); // by name: the node, or null: it has gone
let page = null;
let pageChanged = false;
let scheduled = false;

// budget is for how long, in milliseconds, a frame draws: the rest waits for the next frame, so that the page always answers.
const budget = 10;

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(draw);
}

function draw() {
  scheduled = false;
  const until = performance.now() + budget;
  if (pageChanged) {
    pageChanged = false;
    drawPage();
  }
  for (const [name, node] of pending) {
    pending.delete(name);
    if (node) drawCard(node);
    else dropCard(name);
    if (performance.now() > until) break;
  }
  if (pending.size === 0) {
    for (const card of approaching) {
      approaching.delete(card);
      if (!card.near) continue;
      drawGPUs(card, card.data.gpus);
      break; // to lay out the GPUs of a node takes the browser longer than to draw them
    }
  }
  later();
  if (pending.size + approaching.size > 0) schedule();
}

// What sums up all cards is drawn a few times in a second.
let summing = 0;
function later() {
  if (summing) return;
  summing = setTimeout(() => {
    summing = 0;
    drawTotals();
    drawFilters();
  }, 200);
}

// --- Cards ---

const nodes = by("nodes");
const names = []; // of the cards, sorted

function position(name) {
  let low = 0;
  let high = names.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (names[middle] < name) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The GPUs of a card are in the document only while it is near what is seen: the Tab key and a search make a browser lay out all that is
// in the document, which of 500 nodes takes seconds. What a card says in words is always there.
const approaching = new Set(); // cards that have come near and whose GPUs are not drawn yet
const cardOf = new WeakMap(); // by its element
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = cardOf.get(entry.target);
    card.near = entry.isIntersecting;
    if (card.near) {
      approaching.add(card);
      schedule();
      continue;
    }
    approaching.delete(card);
    if (card.gpus.size === 0) continue;
    if (entry.boundingClientRect.height > 0) card.element.style.minHeight = entry.boundingClientRect.height + "px";
    card.gpus.clear();
    card.body.replaceChildren();
  }
}, { rootMargin: "800px 0px" });

function newCard(name) {
  const card = {
    element: make("li", "card"), button: make("button", "", name), state: make("span"), about: make("p", "muted"),
    message: make("p", "message"), body: make("div", "gpus"), gpus: new Map(),
  };
  card.button.type = "button";
  card.button.tabIndex = cards.size === 0 ? 0 : -1;
  card.button.dataset.name = name;
  card.button.setAttribute("aria-haspopup", "dialog");
  card.element.append(make("div", "row", undefined, make("h3", "", undefined, card.button), card.state), card.about, card.message, card.body);
  const at = position(name);
  nodes.insertBefore(card.element, at < names.length ? cards.get(names[at]).element : null);
  names.splice(at, 0, name);
  cards.set(name, card);
  cardOf.set(card.element, card);
  nearby.observe(card.element);
  return card;
}

function drawCard(node) {
  const card = cards.get(node.name) ?? newCard(node.name);
  card.data = node;
  card.text = [node.name, node.policy, ...node.gpus.flatMap((g) => [
    ...g.drawing.blocks.flatMap((b) => b.holders ?? []), ...(g.containers ?? []).map((c) => c.name),
  ]), ...(node.blockers ?? [])].join("\n").toLowerCase();
  const marked = state(node);
  card.state.replaceWith(marked);
  card.state = marked;
  card.about.textContent = [node.policy ? `policy ${node.policy}` : "no policy", ...node.resources.map(resource)].join(" · ");
  const messages = [node.message, ...(node.blockers ?? []).map((b) => `Blocked by ${b}`), ...(node.notes ?? [])].filter(Boolean);
  card.message.textContent = messages.join("\n");
  card.message.hidden = messages.length === 0;
  if (card.near) drawGPUs(card, node.gpus);
  else if (!card.element.style.minHeight) card.element.style.minHeight = 5 + 7 * node.gpus.length + "rem"; // about as high as it will be
  card.element.hidden = !matches(card);
  if (opened === node.name) drawDetail();
}

// drawGPUs draws those GPUs of a card again that are not as they were.
function drawGPUs(card, gpus) {
  card.element.style.minHeight = "";
  const seen = new Set();
  let before = null;
  for (const value of gpus) {
    const text = JSON.stringify(value);
    let had = card.gpus.get(value.uuid);
    if (!had || had.text !== text) {
      const element = gpu(value);
      if (had) had.element.replaceWith(element);
      had = { text, element };
      card.gpus.set(value.uuid, had);
    }
    const next = before ? before.nextSibling : card.body.firstChild;
    if (next !== had.element) card.body.insertBefore(had.element, next);
    before = had.element;
    seen.add(value.uuid);
  }
  for (const [uuid, had] of card.gpus) {
    if (seen.has(uuid)) continue;
    had.element.remove();
    card.gpus.delete(uuid);
  }
}

function dropCard(name) {
  const card = cards.get(name);
  if (!card) return;
  if (card.button.tabIndex === 0) {
    const next = shown().find((other) => other !== name);
    if (next) moveTo(next, card.button === document.activeElement);
  }
  nearby.unobserve(card.element);
  approaching.delete(card);
  card.element.remove();
  cards.delete(name);
  names.splice(position(name), 1);
  if (opened === name) drawDetail();
}

// --- Keyboard: the cards are one stop of the Tab key, and arrows move among them ---

function shown() {
  return names.filter((name) => !cards.get(name).element.hidden);
}

function moveTo(name, focus) {
  for (const card of cards.values()) if (card.button.tabIndex === 0) card.button.tabIndex = -1;
  const { button } = cards.get(name);
  button.tabIndex = 0;
  if (focus) button.focus();
}

nodes.addEventListener("keydown", (event) => {
  const from = event.target.dataset?.name;
  if (from === undefined) return;
  const all = shown();
  const at = all.indexOf(from);
  const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (all[to] !== undefined) moveTo(all[to], true);
});

nodes.addEventListener("click", (event) => {
  const name = event.target.dataset?.name;
  if (name === undefined) return;
  moveTo(name, true);
  opened = name;
  drawDetail();
  by("detail").showModal();
});

// --- One node in detail ---

let opened = null;

function drawDetail() {
  const card = cards.get(opened);
  by("detail-heading").textContent = opened;
  by("detail").querySelector(".body").replaceChildren(...(card ? detail(card.data) : [make("p", "", "This node has gone.")]));
}

by("detail").addEventListener("close", () => { opened = null; });
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
}

// --- Policies, notes, totals ---

function drawPage() {
  by("cluster").textContent = page.cluster;
  document.title = `GPU Sharing · ${page.cluster}`;
  by("notes").hidden = page.notes.length === 0;
  by("notes").querySelector("ul").replaceChildren(...page.notes.map((text) => make("li", "", text)));
  by("no-policies").hidden = page.policies.length > 0;
  const focused = document.activeElement?.dataset?.policy;
  by("policies").replaceChildren(...page.policies.map(policy));
  if (focused !== undefined) [...by("policies").querySelectorAll("button")].find((b) => b.dataset.policy === focused)?.focus();
  options(by("preview-delete"), "None", page.policies.map((p) => p.name));
}

function policy(p) {
  const element = make("li");
  element.append(make("div", "row", undefined, make("h3", "", p.name), make("span", "muted", p.strategy), state(p)));
  const progress = make("progress");
  progress.max = Math.max(p.matched, 1);
  progress.value = p.ready;
  const text = `${p.ready} of ${p.matched} nodes ready, ${p.updated} updated, ${p.blocked} blocked`;
  progress.setAttribute("aria-label", `Rollout of ${p.name}: ${text}`);
  element.append(progress, make("p", "muted", text));
  if (p.message) element.append(make("p", "message", p.message));
  const button = make("button", "", "Preview deletion…");
  button.type = "button";
  button.dataset.policy = p.name;
  button.setAttribute("aria-label", `Preview the deletion of ${p.name}`);
  button.addEventListener("click", () => {
    by("preview-policies").value = "";
    by("preview-delete").value = p.name;
    by("preview").showModal();
    ask();
  });
  element.append(button);
  return element;
}

function drawTotals() {
  let ready = 0, gpus = 0, used = 0, total = 0, measured = 0, over = 0, changing = 0, count = 0;
  for (const card of cards.values()) {
    if (card.element.hidden) continue;
    count++;
    if (card.data.tone === "ready") ready++;
    else changing++;
    for (const g of card.data.gpus) {
      gpus++;
      if (g.memory) {
        measured++;
        used += g.memory.used;
        total += g.memory.total;
      }
      for (const c of g.containers ?? []) if (c.over) over++;
    }
  }
  const rows = [
    ["Nodes ready", `${ready} of ${count}`], ["Nodes not ready", changing], ["GPUs", gpus],
    ["Memory used", measured ? `${gib(used)} of ${gib(total)}` : "not measured"],
    ["Containers over their share", measured ? over : "not measured"],
  ];
  by("totals").replaceChildren(...rows.map(([title, value]) => make("div", "", undefined, make("dt", "", title), make("dd", "", value))));
  const text = count === cards.size ? `${count} nodes` : `${count} of ${cards.size} nodes`;
  if (by("count").textContent !== text) by("count").textContent = text;
}

// --- Filters ---

const filters = ["by-policy", "by-product", "by-namespace", "by-tone", "by-text"].map(by);
const noPolicy = " "; // no name of an object

function matches(card) {
  const [byPolicy, product, namespace, tone, text] = filters.map((f) => f.value);
  const n = card.data;
  return (!byPolicy || (n.policy ?? noPolicy) === byPolicy) && (!product || n.products.includes(product)) &&
    (!namespace || n.namespaces.includes(namespace)) && (!tone || n.tone === tone) && (!text || card.text.includes(text.toLowerCase()));
}

function filter() {
  for (const card of cards.values()) {
    const hidden = !matches(card);
    if (card.element.hidden !== hidden) card.element.hidden = hidden;
  }
  const all = shown();
  if (all.length > 0 && !all.some((name) => cards.get(name).button.tabIndex === 0)) moveTo(all[0], false);
  drawTotals();
}
for (const f of filters) f.addEventListener("input", filter);

// options lists values in a select, and leaves its choice as it is.
function options(select, none, values, labels = {}) {
  const chosen = select.value;
  const all = [...new Set(chosen ? [...values, chosen] : values)].sort();
  const text = JSON.stringify(all);
  if (select.dataset.options === text) return;
  select.dataset.options = text;
  select.replaceChildren(new Option(none, ""), ...all.map((value) => new Option(labels[value] ?? value, value)));
  select.value = chosen;
}

function drawFilters() {
  const policies = new Set(), products = new Set(), namespaces = new Set();
  for (const { data } of cards.values()) {
    policies.add(data.policy ?? noPolicy);
    data.products.forEach((p) => products.add(p));
    data.namespaces.forEach((n) => namespaces.add(n));
  }
  options(by("by-policy"), "All", policies, { [noPolicy]: "No policy" });
  options(by("by-product"), "All", products);
  options(by("by-namespace"), "All", namespaces);
}

// --- Preview ---

by("ask").addEventListener("click", () => by("preview").showModal());
by("preview-run").addEventListener("click", ask);

for (const id of ["preview-policies", "preview-delete"]) by(id).addEventListener("input", forget);
by("preview").addEventListener("close", () => {
  if (!by("preview").open) forget(); // the event may come after the dialog was opened again
});

// forget takes away the answer to a question that is not what is asked any more, and does not wait for one.
let asked = new AbortController();
function forget() {
  asked.abort();
  asked = new AbortController();
  by("preview-state").textContent = "";
  by("preview-nodes").replaceChildren();
  by("preview-text").hidden = true;
}

async function ask() {
  forget();
  const { signal } = asked;
  by("preview-state").textContent = "Asking the API server…";
  const chosen = by("preview-delete").value;
  try {
    const response = await fetch("api/preview", {
      signal, method: "POST", headers: { ...authorized(), "Content-Type": "application/json" },
      body: JSON.stringify({ policies: by("preview-policies").value, delete: chosen ? [chosen] : [] }),
    });
    if (!response.ok) throw new Error(await response.text());
    const answer = await response.json();
    if (signal.aborted) return;
    by("preview-state").textContent = answer.nodes.length === 0 ? "No GPU changes." : `GPUs of ${answer.nodes.length} nodes change.`;
    by("preview-nodes").replaceChildren(...answer.nodes.map(preview));
    by("preview-text").textContent = answer.text;
    by("preview-text").hidden = false;
  } catch (error) {
    if (signal.aborted) return;
    const lost = error instanceof TypeError; // of which the browser says only that it failed
    by("preview-state").textContent = lost ? "The command does not answer: see whether kubectl gpusharing dashboard still runs." : error.message;
  }
}

// --- The stream of changes ---

function live(text, tone, stale = null) {
  if (by("live").textContent !== text) by("live").textContent = text;
  by("live").dataset.tone = tone;
  by("age").hidden = !stale;
  since = stale && Date.parse(stale.since);
  aged();
}

// The age is outside of what a screen reader reads out, because it changes each second.
let since = null;
function aged() {
  if (since !== null) by("age").textContent = `shown as of ${Math.max(0, Math.round((Date.now() - since) / 1000))} s ago`;
}
setInterval(aged, 1000);


function take(update, first) {
  if (update.page) {
    page = update.page;
    pageChanged = true;
  }
  for (const name of update.gone ?? []) pending.set(name, null);
  if (first) {
    const now = new Set(update.names);
    for (const name of [...cards.keys(), ...pending.keys()]) if (!now.has(name)) pending.set(name, null);
  }
  for (const node of update.nodes ?? []) {
    pending.delete(node.name);
    pending.set(node.name, node);
  }
  schedule();
}

// silence is for how long, in milliseconds, the server may send nothing: it sends an empty line every 5 seconds.
const silence = 15000;
let connection = null;

async function follow(signal, heard) {
  const response = await fetch("api/stream", { headers: authorized(), signal });
  if (!response.ok) throw Object.assign(new Error(await response.text()), { status: response.status });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let first = true;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the command has ended");
    heard();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line) continue;
      take(JSON.parse(line), first);
      first = false;
    }
    if (first) live("Reading the cluster…", "working");
    else if (page.stale) live("Not live: " + page.stale.why, "failed", page.stale); // that the command answers does not show that the API server does
    else live("Live", "ready");
  }
}

let connecting = false;

async function connect() {
  if (connecting) return;
  connecting = true;
  await stayConnected();
  connecting = false;
}

async function stayConnected() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    if (document.hidden) {
      live("Paused", "working");
      return;
    }
    const mine = new AbortController();
    connection = mine;
    let watchdog = 0;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => mine.abort(), silence);
      wait = 500;
    };
    try {
      await follow(mine.signal, heard);
    } catch (error) {
      clearTimeout(watchdog);
      if (document.hidden) continue;
      if (error.status === 401) {
        live("Not allowed: open the address that `kubectl gpusharing dashboard` printed last", "failed");
        return;
      }
      live("Not live: the command does not answer. Trying again…", "failed");
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

// Nobody looks at a hidden page, and nothing is measured for it.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) connection?.abort();
  else connect();
});

setTimeout(connect); // a task of its own, since a browser takes its time to begin with a page
