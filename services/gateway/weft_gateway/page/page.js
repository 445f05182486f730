// The frame: sections, key, theme, shortcuts, and what is asked for again.

import * as adapters from "./adapters.js";
import { at } from "./draw.js";
import { key, poll, read } from "./net.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";

const SECTIONS = ["overview", "adapters", "playground"];
const EVERY_MS = 2000;
const THEME = "weft.theme";

// ---------------------------------------------------------------- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const chosen = localStorage.getItem(THEME);
  document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
}
function otherTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  if (next === (dark.matches ? "dark" : "light")) localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, next);
  paint();
}
dark.addEventListener("change", paint);
paint();

// ---------------------------------------------------------------- sections

const section = () => (SECTIONS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview");
function goTo(name) {
  location.hash = name;
}
function turnTo() {
  for (const name of SECTIONS) {
    at(`at-${name}`).hidden = name !== section();
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === section()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  scrollTo(0, 0);
  again();
}

// ---------------------------------------------------------------- what the gateway says

function state(level, text) {
  at("state").dataset.level = level;
  at("state").textContent = text;
}

function notice(text) {
  at("notice").hidden = !text;
  at("notice").textContent = text;
}

async function look() {
  try {
    const now = await read("ui/overview");
    state(now.ready !== "ok" || !now.scheduler ? "warn" : "good", now.ready !== "ok" ? now.ready : now.scheduler ? now.namespace ?? "ready" : "no scheduler");
    at("state").title = `gateway ${now.gateway}, weft ${now.version}`;
    at("key-open").hidden = !now.keys;
    notice(now.ready === "ok" && !now.scheduler ? "The scheduler is not connected: new requests wait, running ones go on." : "");
    adapters.counts(now.adapters);
    playground.models(now.models);
    if (section() === "overview") {
      overview.show(now);
      await overview.showRunners(now);
    } else if (section() === "adapters") await adapters.show();
  } catch (error) {
    if (error.status === 401) {
      state("warn", "key needed");
      at("key-open").hidden = false;
      keyNeeded = true;
      if (key.get()) at("key-error").textContent = error.message;
      openKey();
    } else if (error.status) {
      state("warn", "not ready");
      notice(error.message);
    } else {
      state("bad", "gateway away");
      notice("The gateway does not answer. What is shown may be old.");
    }
    throw error;
  }
}

// ---------------------------------------------------------------- the key

let keyNeeded = false; // nothing is asked for until there is another one
function openKey() {
  const dialog = at("key-dialog");
  if (dialog.open) return;
  at("key").value = "";
  dialog.showModal();
}
at("key-form").addEventListener("submit", () => {
  key.set(at("key").value.trim());
  at("key").value = "";
  at("key-error").textContent = "";
  keyNeeded = false;
  again();
});
at("key-forget").addEventListener("click", () => {
  key.set("");
  location.reload();
});
at("key-cancel").addEventListener("click", () => at("key-dialog").close());
at("key-open").addEventListener("click", openKey);

// ---------------------------------------------------------------- keyboard

const typing = (node) => node.matches("input, textarea, select, [contenteditable]");
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (document.querySelector("dialog[open]")) return;
    if (!playground.stop() && typing(document.activeElement)) document.activeElement.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || document.querySelector("dialog[open]")) return;
  const on = section();
  const keys = {
    1: () => goTo("overview"),
    2: () => goTo("adapters"),
    3: () => goTo("playground"),
    "?": () => at("help").showModal(),
    t: otherTheme,
    "/": () => {
      if (on === "playground") return playground.pick();
      goTo("adapters");
      turnTo();
      at("search").focus();
    },
  };
  const more = { ArrowLeft: () => adapters.turn(-1), ArrowRight: () => adapters.turn(1), j: () => adapters.move(1), k: () => adapters.move(-1) };
  const act = keys[event.key] ?? (on === "adapters" ? more[event.key] : undefined);
  if (act) {
    event.preventDefault();
    act();
  }
});
at("help-open").addEventListener("click", () => at("help").showModal());
at("theme").addEventListener("click", otherTheme);

// ---------------------------------------------------------------- begin

playground.begin();
adapters.begin((model) => {
  playground.use(model);
  goTo("playground");
  at("prompt").focus();
});
const again = poll(look, EVERY_MS, () => !keyNeeded);
addEventListener("hashchange", turnTo);
turnTo();
