// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

import { detail, gpu, make, memoryText, preview, productsOf, resource, sharesText, state } from "./draw.js";

const by = (id) => document.getElementById(id);

// The token comes in the fragment of the address, which a browser sends to no server, and is kept for this tab alone.
const inAddress = location.hash.slice(1);
if (/^[A-Z2-7]{26}$/.test(inAddress)) {
  sessionStorage.setItem("token", inAddress);
  history.replaceState(null, "", location.pathname);
}
const authorized = () => ({ Authorization: "Bearer " + (sessionStorage.getItem("token") ?? "") });

// --- What the page knows, and what it has not drawn yet ---

const cards = new Map(); // by name: {data, text, group, on}; on, while the card is on the page: {element, button, state, about, message, body, gpus}
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
    if (node) know(node);
    else cards.delete(name);
    if (name === opened) drawDetail();
    if (performance.now() > until) break;
  }
  const [next] = pending.size > 0 ? [] : undrawn; // one: to lay out the GPUs of a node takes the browser longer than to draw them
  if (next) {
    undrawn.delete(next);
    if (next.on) drawGPUs(next.on, next.data.gpus);
  }
  later();
  if (pending.size + undrawn.size > 0) schedule();
}

// What is made of all nodes is made a few times in a second.
let arranging = 0;
function later() {
  arranging ||= setTimeout(arrange, 50);
}

// mostAlone is how many nodes are shown one by one. Of more, equal ones are grouped, as kubectl gpusharing status does, and the nodes of
// the group that is chosen are shown, so many at once: that bounds what a browser lays out.
const mostAlone = 12;
let chosen = ""; // the key of a group
let start = 0; // of the nodes that are shown at once, among those that could be

function arrange() {
  clearTimeout(arranging);
  arranging = 0;
  const all = [...cards.values()].filter(matches);
  const grouped = all.length > mostAlone;
  if (!grouped || !all.some((card) => card.group === chosen)) chosen = "";
  const found = (grouped ? all.filter((card) => card.group === chosen) : all).sort((a, b) => (a.data.name < b.data.name ? -1 : 1));
  if (start >= found.length) start = 0;
  showCards(found.slice(start, start + mostAlone));
  drawGroups(grouped ? all : []);
  drawTotals(all);
  drawFilters();
  by("pages").hidden = found.length <= mostAlone;
  const range = `Nodes ${start + 1} to ${Math.min(start + mostAlone, found.length)} of ${found.length}`;
  if (by("range").textContent !== range) by("range").textContent = range;
  by("nodes-hint").textContent = found.length > 0 ? "The arrow keys move from node to node, Enter opens one."
    : grouped ? "Choose a group of equal nodes, or filter, to see the nodes."
      : cards.size > 0 ? "No node is as the filters ask for." : "No node has a GPUNode: see the labels nvidia.com/gpu.present, and the controller's log.";
}

function turn(by) {
  start = Math.max(0, start + by);
  arrange();
}
by("previous").addEventListener("click", () => turn(-mostAlone));
by("next").addEventListener("click", () => turn(mostAlone));

// --- Groups ---

function drawGroups(all) {
  const groups = new Map();
  for (const { group: key, data } of all) {
    let g = groups.get(key);
    if (!g) groups.set(key, (g = { key, data, nodes: 0, offered: 0, inUse: 0, message: data.message ?? "" }));
    g.nodes++;
    g.offered += data.shares.offered;
    g.inUse += data.shares.inUse;
    if (g.message !== data.message) g.message = "";
  }
  const order = (g) => [g.data.policy ?? "", g.data.tone !== "ready", -g.nodes];
  const sorted = [...groups.values()].sort((a, b) => {
    const [x, y] = [order(a), order(b)];
    const at = x.findIndex((value, i) => value !== y[i]);
    return at < 0 ? 0 : x[at] < y[at] ? -1 : 1;
  });
  const list = by("groups");
  list.hidden = sorted.length === 0;
  const text = JSON.stringify([chosen, sorted.map(({ data, ...g }) => g)]);
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  const focused = document.activeElement?.dataset?.group;
  list.replaceChildren(...sorted.map(groupButton));
  if (focused !== undefined) [...list.querySelectorAll("button")].find((b) => b.dataset.group === focused)?.focus();
}

function groupButton(g) {
  const { data } = g;
  const product = productsOf(data);
  const button = make("button", "", undefined,
    make("span", "what", `${g.nodes} × ${product.includes("×") ? `(${product})` : product}`), " ",
    make("span", "", data.policy ? `policy ${data.policy}` : "no policy"), " ", state(data), " ",
    make("span", "", (data.resources.map(resource).join(" · ") || "nothing") + (g.nodes > 1 ? " each" : "")), " ",
    make("span", "shares", sharesText(g)));
  if (g.message) button.append(" ", make("span", "message", g.message));
  button.type = "button";
  button.dataset.group = g.key;
  button.setAttribute("aria-pressed", g.key === chosen);
  button.addEventListener("click", () => {
    chosen = chosen === g.key ? "" : g.key;
    start = 0;
    arrange();
  });
  return make("li", "", undefined, button);
}

// --- Cards ---

const nodes = by("nodes");
const undrawn = new Set(); // cards that have come onto the page and whose GPUs are not drawn yet

function know(node) {
  const card = cards.get(node.name) ?? {};
  card.data = node;
  card.text = "";
  card.group = JSON.stringify([productsOf(node), node.policy, node.state, node.tone, node.resources]);
  cards.set(node.name, card);
  if (card.on) drawCard(card);
}

// showCards brings those cards onto the page, and no others.
function showCards(all) {
  const names = new Set(all.map((card) => card.data.name));
  const focused = document.activeElement?.closest("#nodes button") ? document.activeElement.dataset.name : undefined;
  for (const element of [...nodes.children]) {
    const { name } = element.dataset;
    if (names.has(name) && cards.get(name).on?.element === element) continue;
    if (cards.has(name)) cards.get(name).on = undefined;
    element.remove();
  }
  all.forEach((card, at) => {
    if (!card.on) {
      card.on = newCard(card.data.name);
      undrawn.add(card);
      drawCard(card);
      schedule();
    }
    if (nodes.children[at] !== card.on.element) nodes.insertBefore(card.on.element, nodes.children[at] ?? null);
  });
  const buttons = [...nodes.querySelectorAll("h3 button")];
  if (buttons.length > 0 && !buttons.some((b) => b.tabIndex === 0)) moveTo(buttons[0], focused !== undefined && !names.has(focused));
}

function newCard(name) {
  const on = {
    element: make("li", "card"), button: make("button", "", name), state: make("span"), about: make("p", "muted"),
    message: make("p", "message"), body: make("div", "gpus"), gpus: new Map(),
  };
  on.element.dataset.name = on.button.dataset.name = name;
  on.button.type = "button";
  on.button.tabIndex = -1;
  on.button.setAttribute("aria-haspopup", "dialog");
  on.element.append(make("div", "row", undefined, make("h3", "", undefined, on.button), on.state), on.about, on.message, on.body);
  return on;
}

function drawCard(card) {
  const { on, data: node } = card;
  const marked = state(node);
  on.state.replaceWith(marked);
  on.state = marked;
  on.about.textContent = [node.policy ? `policy ${node.policy}` : "no policy", ...node.resources.map(resource), sharesText(node.shares)].join(" · ");
  const messages = [node.message, ...(node.blockers ?? []).map((b) => `Blocked by ${b}`), ...(node.notes ?? [])].filter(Boolean);
  on.message.textContent = messages.join("\n");
  on.message.hidden = messages.length === 0;
  if (!undrawn.has(card)) drawGPUs(on, node.gpus);
}

// drawGPUs draws those GPUs of a card again that are not as they were.
function drawGPUs(on, gpus) {
  const seen = new Set();
  let before = null;
  for (const value of gpus) {
    const text = JSON.stringify(value);
    let had = on.gpus.get(value.uuid);
    if (!had || had.text !== text) {
      const element = gpu(value);
      if (had) had.element.replaceWith(element);
      had = { text, element };
      on.gpus.set(value.uuid, had);
    }
    const next = before ? before.nextSibling : on.body.firstChild;
    if (next !== had.element) on.body.insertBefore(had.element, next);
    before = had.element;
    seen.add(value.uuid);
  }
  for (const [uuid, had] of on.gpus) {
    if (seen.has(uuid)) continue;
    had.element.remove();
    on.gpus.delete(uuid);
  }
}

// --- Keyboard: the cards are one stop of the Tab key, and arrows move among them ---

function moveTo(button, focus) {
  for (const other of nodes.querySelectorAll("h3 button")) other.tabIndex = -1;
  button.tabIndex = 0;
  if (focus) button.focus();
}

nodes.addEventListener("keydown", (event) => {
  if (event.target.dataset?.name === undefined) return;
  const all = [...nodes.querySelectorAll("h3 button")];
  const at = all.indexOf(event.target);
  const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (all[to] !== undefined) moveTo(all[to], true);
});

nodes.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  moveTo(button, true);
  opened = button.dataset.name;
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
  by("no-policies").textContent = page.noPolicy ?? "";
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
  element.append(progress, make("p", "muted", `${text}, ${sharesText(p.shares)}`));
  if (p.message) element.append(make("p", "message", p.message));
  for (const note of p.notes ?? []) element.append(make("p", "message muted", note));
  const button = make("button", "", "Preview deletion");
  button.type = "button";
  button.dataset.policy = p.name;
  button.setAttribute("aria-label", `Preview deletion of ${p.name}`);
  button.addEventListener("click", () => {
    by("preview-policies").value = "";
    by("preview-delete").value = p.name;
    by("preview").showModal();
    ask();
  });
  element.append(button);
  return element;
}

function drawTotals(all) {
  let ready = 0, gpus = 0, used = 0, total = 0, measured = 0, over = 0, offered = 0, inUse = 0;
  for (const { data } of all) {
    if (data.tone === "ready") ready++;
    offered += data.shares.offered;
    inUse += data.shares.inUse;
    gpus += data.gpus.length;
    for (const g of data.gpus) {
      if (g.memory) {
        measured++;
        used += g.memory.used;
        total += g.memory.total;
      }
      for (const c of g.containers ?? []) if (c.over) over++;
    }
  }
  const rows = [["Nodes ready", `${ready} of ${all.length}`], ["GPUs", gpus], ["Shares in use", inUse > offered ? `${inUse}, ${offered} offered` : `${inUse} of ${offered}`]];
  if (measured) rows.push(["Memory used", memoryText({ used, total })], ["Containers over their share", over]);
  by("totals").replaceChildren(...rows.map(([title, value]) => make("div", "", undefined, make("dt", "", title), make("dd", "", value))));
  const text = all.length === cards.size ? `${all.length} nodes` : `${all.length} of ${cards.size} nodes`;
  if (by("count").textContent !== text) by("count").textContent = text;
}

// --- Filters ---

const filters = ["by-policy", "by-product", "by-namespace", "by-tone", "by-text"].map(by);
const noPolicy = " "; // no name of an object

function matches(card) {
  const [byPolicy, product, namespace, tone, text] = filters.map((f) => f.value);
  const n = card.data;
  return (!byPolicy || (n.policy ?? noPolicy) === byPolicy) && (!product || n.products.includes(product)) &&
    (!namespace || n.namespaces.includes(namespace)) && (!tone || n.tone === tone) && (!text || textOf(card).includes(text.toLowerCase()));
}

// textOf is what Find looks through.
function textOf(card) {
  const n = card.data;
  return (card.text ||= [n.name, n.policy, ...n.gpus.flatMap((g) => [
    ...g.drawing.blocks.flatMap((b) => b.holders ?? []), ...(g.containers ?? []).map((c) => c.name),
  ]), ...(n.blockers ?? [])].join("\n").toLowerCase());
}

for (const f of filters) f.addEventListener("input", arrange);

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
