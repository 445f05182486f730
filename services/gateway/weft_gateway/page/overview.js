// Totals, latencies, pools, errors, runners, usage by namespace.

import { at, bar, count, el, meter, rows, share, short, spark, td, tierChip, time } from "./draw.js";
import { read } from "./net.js";

const SHOWN_ADAPTERS = 12; // on a runner
const before = new Map(); // runner's incarnation -> {tokens, at_ms, rate}

function tile(name, value, more) {
  return el("dl", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null));
}

function chart(name, value, values, label, shares) {
  return el(
    "div",
    { class: "chart" },
    el("dl", {}, el("dt", {}, name), el("dd", {}, value)),
    el("div", { class: "shares" }, (shares ?? []).map(([what, figure]) => el("span", {}, `${what} `, el("b", {}, figure)))),
    spark(values, label),
    el("div", { class: "axis", "aria-hidden": "true" }, el("span", {}, "1 h ago"), el("span", {}, "now")),
  );
}

function latency(name, figures) {
  return chart(name, time(figures.p50), figures.by_minute, `${name}: median by minute over the last hour`, [
    ["p90", time(figures.p90)],
    ["p99", time(figures.p99)],
  ]);
}

export function show(now) {
  const { hour } = now;
  const ready = now.pools.reduce((sum, pool) => sum + pool.ready_runners, 0);
  at("tiles").replaceChildren(
    tile("Running", count(now.in_flight - now.waiting), "requests"),
    tile("Queue", count(now.waiting), "without a runner"),
    tile("Runners", count(ready), "ready"),
    tile("Adapters", short(now.adapters.served), now.adapters.unserved ? `${short(now.adapters.unserved)} not served` : "all served"),
    tile("Tokens", short(hour.completion_tokens), "last hour"),
    tile("Errors", hour.requests ? `${(100 * share(hour.failed, hour.requests)).toFixed(hour.failed ? 1 : 0)} %` : "–", `of ${short(hour.requests)}`),
  );
  at("charts").replaceChildren(
    latency("Time to first token", hour.latency.ttft),
    latency("Time per token", hour.latency.token),
    latency("End to end", hour.latency.total),
    chart("Requests", count(hour.requests), hour.requests_by_minute, "Requests by minute over the last hour", [
      ["last minute", count(hour.requests_by_minute.at(-2))],
      ["failed", count(hour.failed)],
    ]),
  );
  rows(
    at("pools"),
    now.pools.map((pool) =>
      el("tr", {}, td(pool.name, "name"), td(pool.base), td(pool.ready_runners ? count(pool.ready_runners) : el("span", { class: "tag warn" }, "none ready"), "n"),
        td(count(pool.in_flight - pool.waiting), "n"), td(count(pool.waiting), "n"), td(pool.context ? short(pool.context) : "–", "n"))),
    6,
    "No pool that you may use.",
  );
  const most = Math.max(...hour.errors.map((one) => one.count), 1);
  rows(
    at("errors"),
    hour.errors.map((one) => el("tr", {}, td(el("span", { class: `tag ${one.status >= 500 ? "bad" : "warn"}` }, String(one.status)), ""), td(el("code", {}, one.code)), td(count(one.count), "n"), td(bar(one.count / most, "bad-bar")))),
    4,
    "None.",
  );
  at("tenants-part").hidden = now.namespace !== null || now.tenants.every((one) => one.namespace === "");
  const busiest = Math.max(...now.tenants.map((one) => one.requests), 1);
  rows(
    at("tenants"),
    now.tenants.map((one) => el("tr", {}, td(one.namespace || "none", "name"), td(count(one.requests), "n"), td(count(one.failed), "n"), td(count(one.prompt_tokens), "n"), td(count(one.completion_tokens), "n"), td(bar(one.requests / busiest)))),
    6,
    "No requests.",
  );
}

function rate(runner, at_ms) {
  const known = before.get(runner.incarnation);
  if (known && known.at_ms === at_ms) return known.rate;
  const seconds = known ? (at_ms - known.at_ms) / 1000 : 0;
  const found = seconds > 0 && seconds < 60 ? Math.max(0, (runner.tokens - known.tokens) / seconds) : null;
  before.set(runner.incarnation, { tokens: runner.tokens, at_ms, rate: found });
  return found;
}

function chips(runner) {
  const shown = runner.adapters.slice(0, SHOWN_ADAPTERS);
  const list = shown.map((one) => {
    const name = one.model ?? one.digest.slice(0, 19);
    const tier = one.error ? "error" : one.loading ? "loading" : one.tier;
    const what = one.error ? `failed to load: ${one.error}` : one.loading ? "is being loaded" : one.tier === "device" ? "on the device" : `in ${one.tier} memory`;
    return tierChip(tier, name, `${name}: ${what}, ${one.running} running`, one.running);
  });
  const more = runner.adapters.length - shown.length + runner.adapters_left_out;
  return el("div", { class: "chips" }, list, more > 0 ? el("span", { class: "soft" }, `+${count(more)}`) : null, list.length ? null : el("span", { class: "soft" }, "base only"));
}

const cell = (name, value, kind) => el("td", { "data-name": name, class: kind }, value); // a phone shows the name

function row(runner, at_ms) {
  const state = runner.draining ? "draining" : runner.ready ? "" : "not ready";
  const role = runner.role === "mixed" ? "" : `${runner.role} phase`;
  const tokens = rate(runner, at_ms);
  const kv = runner.total_pages - runner.free_pages - runner.adapter_pages;
  const used = `${Math.round(100 * share(kv + runner.adapter_pages, runner.total_pages))} %`;
  return el(
    "tr",
    {},
    el("td", { class: "name" }, runner.name, " ", state ? el("span", { class: "tag warn" }, state) : null, el("small", {}, runner.pool, role ? `, ${role}` : "")),
    cell("Batch", meter([share(runner.sequences, runner.max_sequences)], `${runner.sequences}/${runner.max_sequences}`, `${runner.sequences} of ${runner.max_sequences} sequences`)),
    cell("Tokens/s", tokens === null ? "–" : count(Math.round(tokens)), "n"),
    cell("KV", meter([share(kv, runner.total_pages), share(runner.adapter_pages, runner.total_pages)], used, `${kv} pages of sequences and ${runner.adapter_pages} of adapters, of ${runner.total_pages}`)),
    cell("Adapters", chips(runner), "all"),
    cell("Prompts", runner.pending_prompt_tokens ? short(runner.pending_prompt_tokens) : "–", "n"),
  );
}

export async function showRunners(now) {
  at("runners-part").hidden = now.namespace !== null;
  if (now.namespace !== null) return;
  const { runners, left_out, at_ms } = await read("ui/runners");
  const present = new Set(runners.map((one) => one.incarnation));
  for (const gone of [...before.keys()].filter((one) => !present.has(one))) before.delete(gone);
  const total = runners.reduce((sum, one) => sum + (rate(one, at_ms) ?? 0), 0);
  at("runners-note").textContent = runners.length ? `${count(runners.length + left_out)} ${runners.length + left_out === 1 ? "runner" : "runners"}, ${count(Math.round(total))} tokens/s` : "";
  rows(at("runners"), runners.map((one) => row(one, at_ms)), 6, now.scheduler ? "No runner has reported." : "The scheduler is not connected.");
}
