// Copyright The GPU Sharing Operator Authors.
// SPDX-License-Identifier: Apache-2.0

// What the page draws of values. Text reaches the document as text alone: names and messages come from the cluster, and may be anything.

// make makes an element with a class, a text, and children.
export function make(tag, name, text, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined && text !== null) element.textContent = text;
  element.append(...children);
  return element;
}

const gibibyte = 2 ** 30;
const unknown = "–";

export function gib(bytes) {
  return bytes === undefined || bytes === null ? unknown : (bytes / gibibyte).toFixed(1) + " GiB";
}

// memoryText is "18.4 of 19.5 GiB".
export function memoryText({ used, total }) {
  const [unit, name] = total < 2 ** 40 ? [gibibyte, "GiB"] : [2 ** 40, "TiB"];
  return `${(used / unit).toFixed(1)} of ${(total / unit).toFixed(1)} ${name}`;
}

export function percent(ratio) {
  return ratio === undefined || ratio === null ? unknown : Math.round(ratio * 100) + " %";
}

export function state(value) {
  const element = make("span", "state", value.state);
  element.dataset.tone = value.tone;
  return element;
}

// mostBlocks is how many blocks of a GPU a card draws; the others share one.
const mostBlocks = 14;

// drawing draws the blocks of a GPU to scale.
export function drawing(value, label, all) {
  const list = make("ul", "drawing");
  list.setAttribute("aria-label", label);
  let blocks = value.blocks;
  if (!all && blocks.length > mostBlocks) {
    const rest = blocks.slice(mostBlocks - 1);
    const holders = rest.flatMap((b) => b.holders ?? []);
    blocks = blocks.slice(0, mostBlocks - 1);
    blocks.push({ size: rest.reduce((sum, b) => sum + b.size, 0), name: `${rest.length} more`, holders });
  }
  for (const b of blocks) list.append(block(b));
  return list;
}

function block(b) {
  const holders = b.holders ?? [];
  const who = holders.length > 0 ? holders.join(", ") : b.name ? "free" : "";
  const kind = b.new ? "new" : !b.name ? "room" : holders.length > 0 ? "held" : "free";
  const element = make("li", "block " + kind);
  element.style.flexGrow = b.size;
  let what = b.name || "unused";
  if (b.new) what += ", new";
  const used = b.memory ? memoryText(b.memory) : "";
  element.append(make("span", "what", what), " ", make("span", "who", who));
  if (used) element.append(" ", make("span", "what", used));
  if (b.utilization !== undefined) element.append(" ", make("span", "what", "SM " + percent(b.utilization)));
  element.title = [what, who, used].filter(Boolean).join("\n");
  return element;
}

const full = 0.95;

// meter draws how much of the memory of a GPU is used.
export function meter(gpu) {
  const { used, total } = gpu.memory;
  const text = memoryText(gpu.memory) + (gpu.utilization === undefined ? "" : `, SM ${percent(gpu.utilization)}`);
  const element = make("div", "meter" + (used > full * total ? " full" : ""));
  const track = make("div", "track");
  track.setAttribute("role", "meter");
  track.setAttribute("aria-label", `Memory of GPU ${gpu.index}`);
  track.setAttribute("aria-valuemin", 0);
  track.setAttribute("aria-valuemax", total);
  track.setAttribute("aria-valuenow", used);
  track.setAttribute("aria-valuetext", text);
  const fill = make("div", "fill");
  fill.style.width = Math.min(100, (100 * used) / Math.max(total, 1)) + "%";
  track.append(fill);
  element.append(track, make("span", "", text));
  return element;
}

export function heading(gpu) {
  const size = gpu.memoryBytes ? gib(gpu.memoryBytes) : "";
  const element = make("h4", "", `GPU ${gpu.index}`);
  for (const text of [gpu.product, size, gpu.sharing]) if (text) element.append(" ", make("span", "", text));
  return element;
}

// mostContainers is how many containers of a GPU a card lists.
const mostContainers = 4;

// gpu draws a GPU as a card shows it.
export function gpu(value) {
  const element = make("section", "gpu");
  element.append(heading(value), drawing(value.drawing, `GPU ${value.index}`, false));
  if (value.others) element.append(make("p", "muted", `Also used by ${value.others.join(", ")}`));
  if (value.memory) element.append(meter(value));
  const containers = value.containers ?? [];
  if (containers.length > 0) {
    const list = make("ul", "uses");
    list.setAttribute("aria-label", `Containers on GPU ${value.index}`);
    for (const c of containers.slice(0, mostContainers)) {
      const use = `${gib(c.usedBytes)} of ${gib(c.shareBytes)}` + (c.over ? ", over its share" : "");
      list.append(make("li", "", undefined, make("span", "", c.name), make("span", c.over ? "over" : "", use), make("span", "", percent(c.utilization))));
    }
    if (containers.length > mostContainers) list.append(make("li", "muted", `and ${containers.length - mostContainers} more`));
    element.append(list);
  }
  return element;
}

function table(titles, rows) {
  const head = make("tr");
  for (const title of titles) {
    const cell = make("th", "", title);
    cell.scope = "col";
    head.append(cell);
  }
  const body = make("tbody");
  for (const row of rows) body.append(make("tr", "", undefined, ...row.map((text) => make("td", "", text))));
  return make("table", "", undefined, make("thead", "", undefined, head), body);
}

function list(tag, name, title, items) {
  return [make("h3", "", title), make(tag, name, undefined, ...items.map((text) => make("li", "", text)))];
}

export function resource(r) {
  const now = r.now ?? unknown;
  return r.then === undefined ? `${r.name}: ${now}` : `${r.name}: ${now} → ${r.then}`;
}

// sharesText is "8 of 58 shares in use". While a node changes, more can be held than are offered.
export function sharesText({ offered, inUse }) {
  const plural = (n) => (n === 1 ? "share" : "shares");
  return inUse > offered ? `${inUse} ${plural(inUse)} in use, ${offered} offered` : `${inUse} of ${offered} ${plural(offered)} in use`;
}

// productsOf names the GPUs of a node, such as "2 × Tesla-T4".
export function productsOf(node) {
  const counts = new Map();
  for (const g of node.gpus) counts.set(g.product, (counts.get(g.product) ?? 0) + 1);
  const alone = counts.size === node.gpus.length;
  return [...counts].map(([product, n]) => (alone ? product : `${n} × ${product}`)).join(", ") || "unknown GPUs";
}

// users are who has a part of a GPU, by full name, and what was measured of them.
function users(g) {
  const has = new Map(g.drawing.blocks.flatMap((b) => (b.holders ?? []).map((name) => [name, b.name])));
  const podOf = (c) => c.name.split(" ")[0];
  const rows = (g.containers ?? []).map((c) => [
    c.name, c.where ?? has.get(podOf(c)) ?? "", gib(c.usedBytes) + (c.over ? " (over its share)" : ""), gib(c.shareBytes), percent(c.utilization),
  ]);
  if (g.otherBytes) rows.push(["no container", "", gib(g.otherBytes), unknown, unknown]);
  for (const c of g.containers ?? []) has.delete(podOf(c));
  const width = rows.length > 0 ? 5 : 2; // nothing may be measured
  for (const row of has) rows.push([...row, unknown, unknown, unknown]);
  return rows.length > 0 ? [table(["Pod", "Has", "Memory", "Share", "SM"].slice(0, width), rows.map((row) => row.slice(0, width)))] : [];
}

// detail is all that is known of a node.
export function detail(node) {
  const parts = [make("p", "row", undefined, make("span", "", node.policy ? `Policy ${node.policy}` : "No policy"), state(node))];
  if (node.message) parts.push(make("p", "message", node.message));
  for (const note of node.notes ?? []) parts.push(make("p", "message", note));
  parts.push(make("p", "muted", sharesText(node.shares)));
  if (node.resources.length > 0) parts.push(...list("ul", "plain", "Advertised", node.resources.map(resource)));
  if (node.steps) parts.push(...list("ol", "", "Steps of the change", node.steps));
  if (node.blockers) parts.push(...list("ul", "plain", "Blocked by", node.blockers));
  for (const g of node.gpus) {
    const element = make("section", "gpu");
    element.append(heading(g), make("p", "muted", g.uuid), drawing(g.drawing, `GPU ${g.index}`, true));
    if (g.others) element.append(make("p", "muted", `Also used by ${g.others.join(", ")}`));
    if (g.memory) element.append(meter(g));
    element.append(...users(g));
    parts.push(element);
  }
  return parts;
}

// preview is a node before and after a change.
export function preview(node) {
  const parts = [make("h3", "", node.name)];
  for (const g of node.gpus) {
    const element = make("section", "gpu");
    const sides = make("div", "sides");
    sides.append(make("span", "", "Before"), drawing(g.before, `GPU ${g.index} before`, true));
    sides.append(make("span", "", "After"), drawing(g.after, `GPU ${g.index} after`, true));
    element.append(heading(g), sides);
    parts.push(element);
  }
  return make("section", "gpus", undefined, ...parts);
}
