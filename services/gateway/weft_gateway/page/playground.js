// Two models, one prompt, one seed. Answers stream side by side.

import { at, count, el, time } from "./draw.js";
import { chat, read } from "./net.js";

const FOUND = 20; // of a search for models
let bases = [];
let running = null; // AbortController of both answers
const columns = [];

class Column {
  constructor(index) {
    this.index = index;
    this.options = [];
    this.chosen = -1;
    const list = `options-${index}`;
    this.input = el("input", {
      type: "text", role: "combobox", "aria-label": `Model ${index ? "B" : "A"}`, "aria-expanded": "false", "aria-controls": list,
      "aria-autocomplete": "list", autocomplete: "off", spellcheck: "false", placeholder: index ? "Compare with (optional)" : "Model", id: `model-${index}`,
    });
    this.list = el("ul", { class: "options", role: "listbox", id: list, "aria-label": "Models", hidden: true });
    this.answer = el("p", { class: "answer", "aria-live": "off", id: `answer-${index}` });
    this.figures = el("div", { class: "figures", id: `figures-${index}`, role: "status" });
    this.node = el("div", { class: "column" }, el("div", { class: "picker" }, this.input, this.list), this.answer, this.figures);
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("focus", () => { this.input.select(); this.search(""); });
    this.input.addEventListener("blur", () => setTimeout(() => this.close(), 120));
    this.input.addEventListener("keydown", (event) => this.key(event));
  }

  get model() {
    return this.input.value.trim();
  }

  async search(text = this.model) {
    const asked = (this.asked = {});
    const needle = text.toLowerCase();
    const own = bases.filter((name) => name.toLowerCase().includes(needle)).map((name) => ({ name, what: "base" }));
    let found = [];
    try {
      found = (await read("ui/adapters", { q: text, limit: FOUND })).adapters.map((one) => ({ name: one.model, what: one.state === "served" ? one.pool : one.state }));
    } catch {
      found = [];
    }
    if (this.asked !== asked || document.activeElement !== this.input) return;
    this.options = [...own, ...found].slice(0, FOUND);
    this.chosen = this.options.length && text ? 0 : -1;
    this.draw();
  }

  draw() {
    const items = this.options.map((one, index) => el(
      "li",
      { role: "option", id: `option-${this.index}-${index}`, "aria-selected": String(index === this.chosen), onmousedown: (event) => { event.preventDefault(); this.take(index); } },
      el("span", {}, one.name),
      el("small", {}, one.what),
    ));
    this.list.replaceChildren(...items);
    this.list.hidden = !items.length;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    if (this.chosen >= 0) {
      this.input.setAttribute("aria-activedescendant", `option-${this.index}-${this.chosen}`);
      items[this.chosen].scrollIntoView({ block: "nearest" });
    } else this.input.removeAttribute("aria-activedescendant");
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && this.options.length) {
      event.preventDefault();
      this.chosen = (this.chosen + step + this.options.length) % this.options.length;
      this.draw();
    } else if (event.key === "Enter" && !this.list.hidden && this.chosen >= 0) {
      event.preventDefault();
      this.take(this.chosen);
    } else if (event.key === "Escape" && !this.list.hidden) {
      event.stopPropagation();
      this.close();
    }
  }

  take(index) {
    this.input.value = this.options[index].name;
    this.close();
    at("prompt").focus();
  }

  close() {
    this.asked = null;
    this.options = [];
    this.chosen = -1;
    this.draw();
  }

  async run(body, signal) {
    const began = performance.now();
    let first = 0;
    let tokens = 0;
    let reason = "";
    this.answer.replaceChildren();
    this.answer.classList.add("thinking");
    this.show([["waiting", ""]]);
    const figures = (end) => {
      const seconds = (end - first) / 1000;
      const list = [["first token", first ? time(first - began) : "–"], ["in all", time(end - began)]];
      if (tokens > 1 && seconds > 0) list.push(["tokens/s", ((tokens - 1) / seconds).toFixed(1)]);
      if (tokens) list.push(["tokens", count(tokens)]);
      if (reason) list.push(["finish", reason]);
      this.show(list);
    };
    try {
      for await (const event of chat({ ...body, model: this.model }, signal)) {
        if (event.text) {
          first ||= performance.now();
          tokens += 1;
          this.answer.append(event.text);
        }
        tokens = event.usage?.completion_tokens ?? tokens;
        reason = event.reason ?? reason;
        if (event.text) figures(performance.now());
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "you";
      else this.answer.append(el("span", { class: "bad" }, error.message));
    }
    this.answer.classList.remove("thinking");
    figures(performance.now());
  }

  show(list) {
    this.figures.replaceChildren(...list.map(([name, value]) => el("span", {}, value ? el("b", {}, value) : null, value ? " " : "", name)));
  }
}

function number(id) {
  const { value } = at(id);
  return value === "" ? undefined : Number(value);
}

async function run() {
  const models = columns.filter((column) => column.model);
  if (!models.length) return columns[0].input.focus();
  stop();
  const own = (running = new AbortController());
  at("stop").hidden = false;
  const system = at("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: at("prompt").value }];
  const body = { messages, temperature: number("temperature"), max_tokens: number("max-tokens"), seed: number("seed") };
  await Promise.all(models.map((column) => column.run(body, own.signal)));
  if (running === own) {
    running = null;
    at("stop").hidden = true;
  }
}

export function stop() {
  if (!running) return false;
  running.abort();
  running = null;
  at("stop").hidden = true;
  return true;
}

export function models(names) {
  bases = names;
  if (names.length && !columns.some((column) => column.model) && !columns[0].input.matches(":focus")) columns[0].input.value = names[0];
}

export function use(model) {
  const free = columns[0].model && columns[0].model !== model && bases.includes(columns[0].model) ? 1 : 0;
  columns[free].input.value = model;
}

export const pick = () => columns[0].input.focus();

export function begin() {
  columns.push(new Column(0), new Column(1));
  at("columns").replaceChildren(...columns.map((column) => column.node));
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      at("ask").requestSubmit();
    }
  });
  at("stop").addEventListener("click", stop);
}
