// The table of adapters: one page of it at a time, searched and cut by the gateway.

import { at, count, el, rows, td, tierChip } from "./draw.js";
import { read } from "./net.js";

const LIMIT = 50;
const view = { state: "served", search: "", skip: 0, more: false };
let asked = null; // the last question: an answer to an earlier one is not shown
let tryIt = () => {};

const HEADS = {
  served: ["Adapter", "Pool", "State", "In memory", "!Running", "!Rank", ""],
  unserved: ["Adapter", "Pool", "Reason", "Why, and what to do"],
};
const STATES = { served: ["good", "served"], waiting: ["warn", "waiting"], failing: ["bad", "failing"] };

function servedRow(one) {
  const [level, name] = STATES[one.state];
  const tiers = Object.entries(one.tiers).map(([tier, runners]) => tierChip(tier, tier, `${runners} runners have it on ${tier}`, runners > 1 ? runners : 0));
  if (one.loading) tiers.push(tierChip("loading", "loading", `${one.loading} runners load it`));
  const none = el("span", { class: "soft" }, "on demand");
  const run = el("button", { class: "quiet try", type: "button", tabindex: "-1", onclick: () => tryIt(one.model) }, "Try");
  return el(
    "tr",
    { tabindex: "0", "data-key": one.model, "data-model": one.model },
    el("td", { class: "name" }, one.model, el("small", { class: "mono" }, one.digest.slice(0, 19))),
    td(one.pool),
    td([el("span", { class: `tag ${level}` }, name), one.why ? el("div", { class: "why" }, el("small", {}, one.why)) : ""].flat()),
    td(el("div", { class: "chips" }, tiers.length ? tiers : none)),
    td(count(one.in_flight), "n"),
    td(count(one.rank), "n"),
    td(run),
  );
}

function unservedRow(one) {
  return el(
    "tr",
    { tabindex: "0", "data-key": one.model },
    td(one.model, "name"),
    td(one.pool),
    td(el("span", { class: "tag bad" }, one.reason)),
    el("td", { class: "why" }, one.why, one.advice ? el("small", {}, one.advice) : null),
  );
}

export async function show() {
  const question = JSON.stringify(view);
  asked = question;
  const found = await read("ui/adapters", { state: view.state, q: view.search, skip: view.skip, limit: LIMIT });
  if (asked !== question) return;
  const heads = HEADS[view.state];
  at("adapter-head").replaceChildren(el("tr", {}, heads.map((head) => el("th", head.startsWith("!") ? { class: "n" } : {}, head.replace("!", "")))));
  const list = found.adapters.map(view.state === "served" ? servedRow : unservedRow);
  const nothing = view.search ? `No name holds “${view.search}”.` : view.state === "served" ? "No adapter is served." : "Every adapter is served.";
  rows(at("adapter-rows"), list, heads.length, nothing);
  view.more = found.more;
  const last = found.skip + found.adapters.length;
  at("range").textContent = found.adapters.length ? `${count(found.skip + 1)}–${count(last)}${view.search ? (found.more ? " of more" : ` of ${count(last)} found`) : ` of ${count(found.total)}`}` : "";
  at("newer").disabled = !view.skip;
  at("older").disabled = !view.more;
}

export function counts({ served, unserved }) {
  at("tab-served").querySelector("b").textContent = count(served);
  at("tab-unserved").querySelector("b").textContent = count(unserved);
}

export function turn(pages) {
  if ((pages < 0 && view.skip) || (pages > 0 && view.more)) {
    view.skip = Math.max(0, view.skip + pages * LIMIT);
    show().catch(() => {});
  }
}

// j and k, and Enter
export function move(step) {
  const list = [...at("adapter-rows").querySelectorAll("tr[tabindex]")];
  const present = list.indexOf(document.activeElement);
  list[Math.min(list.length - 1, Math.max(0, present + step))]?.focus();
}

function choose(state) {
  view.state = state;
  view.skip = 0;
  for (const name of ["served", "unserved"]) {
    const tab = at(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === state));
    tab.tabIndex = name === state ? 0 : -1;
  }
  return show().catch(() => {});
}

export function begin(onTry) {
  tryIt = onTry;
  for (const name of ["served", "unserved"]) {
    at(`tab-${name}`).addEventListener("click", () => choose(name));
    at(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.stopPropagation();
      const other = name === "served" ? "unserved" : "served";
      at(`tab-${other}`).focus();
      choose(other);
    });
  }
  let pause = 0;
  at("search").addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => {
      view.search = at("search").value.trim();
      view.skip = 0;
      show().catch(() => {});
    }, 120);
  });
  at("newer").addEventListener("click", () => turn(-1));
  at("older").addEventListener("click", () => turn(1));
  at("adapter-rows").addEventListener("keydown", (event) => {
    const { model } = event.target.dataset ?? {};
    if (event.key === "Enter" && model) tryIt(model);
  });
}
