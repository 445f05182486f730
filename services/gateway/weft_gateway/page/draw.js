// Elements. Values reach the page as text only (textContent, attributes by name): a model's name is never markup.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

// Rows of a table body; one line where there are none. The focused row keeps the focus by its data-key.
export function rows(body, list, columns, empty) {
  const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr")?.dataset.key : undefined;
  const none = el("tr", {}, el("td", { class: "empty", colspan: columns }, empty));
  body.replaceChildren(...(list.length ? list : [none]));
  if (focused !== undefined) [...body.rows].find((row) => row.dataset.key === focused)?.focus({ preventScroll: true });
}

export const td = (value, kind) => el("td", kind ? { class: kind } : {}, value ?? "");

const NUMBER = new Intl.NumberFormat("en");
export const count = (value) => NUMBER.format(value ?? 0);

export function short(value) {
  if (value < 10_000) return count(Math.round(value));
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(value < 1e8 ? 1 : 0)}M`;
}

export function time(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

export const share = (part, whole) => (whole ? part / whole : 0);

// A line over the last hour; null: nothing was measured in that minute.
export function spark(values, label) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, 0) * 1.08 || 1;
  const x = (index) => ((index / Math.max(1, values.length - 1)) * 100).toFixed(2);
  const y = (value) => (38 - (value / top) * 36).toFixed(2);
  let line = "";
  let area = "";
  let begun = -1;
  values.forEach((value, index) => {
    if (value === null) return;
    const fresh = begun < 0 || values[index - 1] === null;
    if (fresh) begun = index;
    line += `${fresh ? "M" : "L"}${x(index)} ${y(value)}`;
    const last = index === values.length - 1 || values[index + 1] === null;
    if (last && begun === index) line += `l.01 0`;
    if (last) area += `M${x(begun)} 39` + values.slice(begun, index + 1).map((v, i) => `L${x(begun + i)} ${y(v)}`).join("") + `L${x(index)} 39Z`;
  });
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("line", { x1: 0, x2: 100, y1: 39, y2: 39 }),
    area && svg("path", { class: "area", d: area }),
    line && svg("path", { d: line }),
  );
}

export function meter(parts, text, label) {
  let from = 0;
  const bars = parts.map((part, index) => {
    const width = Math.min(84 - from, Math.max(part > 0 ? 2 : 0, part * 84));
    const bar = svg("rect", { class: index ? "second" : "used", x: from, width, height: 6, rx: 1 });
    from += width;
    return bar;
  });
  return el(
    "div",
    { class: "meter" },
    svg("svg", { viewBox: "0 0 84 6", role: "img", "aria-label": label }, svg("rect", { width: 84, height: 6, rx: 3 }), bars),
    text,
  );
}

export function bar(part, kind = "") {
  return svg(
    "svg",
    { class: `bar1 ${kind}`, viewBox: "0 0 84 6", "aria-hidden": "true" },
    svg("rect", { width: 84, height: 6, rx: 3 }),
    svg("rect", { class: "used", width: Math.max(part > 0 ? 3 : 0, part * 84), height: 6, rx: 3 }),
  );
}

export function tierChip(tier, text, title, running = 0) {
  return el("span", { class: "chip", "data-tier": tier, title }, el("i"), el("span", {}, text), running ? el("b", {}, count(running)) : null);
}
