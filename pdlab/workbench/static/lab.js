// Shared by the labs: controls that say what they are set to, words and axes for what they show, and what
// PolicyLab and PDLab do alike. Prepended to these two and WinMap.

// ---- controls -------------------------------------------------------------------------------

/** Radio buttons that look like one bar: the arrow keys choose. `unknown` is said of a value without a hint. */
function radios(name, onchoose, unknown = "") {
  const group = uniqueId(name);
  const node = h("div.pd-pl-bar", { role: "radiogroup", "aria-label": name });
  let shown = null;
  const option = (value, label, hint) => {
    const input = h("input", { type: "radio", name: group, value, onchange: () => onchoose(value) });
    return h("label", { title: hint ?? unknown }, [input, h("span", {}, [label])]);
  };
  return {
    node,
    sync(values, labels, hints) {
      if (shown === values.join()) return;
      shown = values.join();
      clear(node, ...values.map((v) => option(v, labels[v], hints[v])));
    },
    choose(value) {
      for (const input of node.querySelectorAll("input")) input.checked = input.value === value;
    },
  };
}

function choice(label, values, onchoose) {
  return h("select", { "aria-label": label, onchange: (e) => onchoose(e.target.value) }, values.map((v) => h("option", { value: v }, [v])));
}

/** A control under its label. */
function group(label, node) {
  return h("div.pd-pl-group", {}, [h("span.pd-pl-label", {}, [label]), node]);
}

/** A slider over a list of values; `values` may be replaced. */
function slider(label, hint, values, onchoose, text) {
  const self = { values };
  const value = h("b.pd-num");
  const say = (v) => ((value.textContent = text(v)), input.setAttribute("aria-valuetext", text(v)));
  const input = h("input", { type: "range", min: 0, step: 1, "aria-label": label, oninput: () => (say(self.values[+input.value]), onchoose(self.values[+input.value])) });
  self.node = h("label.pd-pl-slider", { title: hint }, [h("span", {}, [h("span.pd-pl-label", {}, [label]), value]), input]);
  self.sync = (v) => {
    input.max = self.values.length - 1;
    input.value = nearestPlace(self.values, v);
    say(v);
  };
  return self;
}

function nearestPlace(values, value) {
  if (value === null) return values.indexOf(null);
  const far = (v) => (v === null ? Infinity : Math.abs(Math.log(v / value)));
  return values.reduce((best, v, i) => (far(v) < far(values[best]) ? i : best), 0);
}

/** A slider's values: from an eighth of the usual rate to eight times it. */
function ratesAround(usual) {
  return Array.from({ length: 49 }, (_, i) => Number((usual * 2 ** (i / 8 - 3)).toPrecision(2)));
}

/** Keys typed in a box must not reach JupyterLab. */
function keepKeys(event) {
  if (event.key !== "Escape") event.stopPropagation();
  if (event.key === "Enter") event.target.blur();
}

function readNumber(text) {
  const value = Number(String(text).replace(",", "."));
  return text.trim() && isFinite(value) ? value : text;
}

// ---- words and axes -------------------------------------------------------------------------

const digitsOf = (value) => (value == null ? "–" : digits(value));
const signed = (value) => (value > 0 ? `+${value}` : value < 0 ? `−${-value}` : "0");
const rateText = (value) => digits(value);

/** "▼ −34 % better": an arrow and a word, so that no colour has to say it. */
function changeText(value, old, better) {
  if (value == null || old == null) return h("span.pd-pl-change", {}, ["–"]);
  if (value === old) return h("span.pd-pl-change", {}, ["= as pinned"]);
  if (!old) return h("span.pd-pl-change", {}, [value > 0 === better > 0 ? "better" : "worse"]);
  const ratio = value / old;
  if (Math.abs(ratio - 1) < 0.005) return h("span.pd-pl-change", {}, ["≈ as pinned"]);
  const text = ratio >= 3 ? `${digits(ratio)} ×` : `${signed(Math.round((ratio - 1) * 100))} %`;
  const good = value > old === better > 0;
  return h("span.pd-pl-change", { "data-good": String(good) }, [h("b", {}, [`${value > old ? "▲" : "▼"} ${text}`]), ` ${good ? "better" : "worse"}`]);
}

/** A column for each number; for each run what was measured, simulated, and by how much they differ. */
function comparison(runs) {
  const show = ({ unit }, value) => (value == null ? "–" : unit === "s" ? duration(value) : unit === "B" ? quantity(value, "B") : `${digits(value)} ${unit}`);
  const off = (row) => (row.measured ? `${signed(Math.round((row.simulated / row.measured - 1) * 100))} %` : "–");
  const line = (spec, title, values) => h(spec, {}, [h("th", {}, [title]), ...values.map((text) => h("td", {}, [text]))]);
  const head = h("tr", {}, [h("th"), ...runs[0].rows.map((row) => h("th", {}, [row.label]))]);
  const lines = runs.flatMap(({ name, rows }) => {
    const of = (kind) => [name ? `${name}, ${kind}` : kind, rows.map((row) => show(row, row[kind]))];
    return [line("tr.pd-strong", ...of("measured")), line("tr", ...of("simulated")), line("tr", "simulated is off by", rows.map(off))];
  });
  return h("div.pd-pl-scroll", {}, [h("table", {}, [h("thead", {}, [head]), h("tbody", {}, lines)])]);
}

/** Said of a run for real that had company. */
function besideText(count) {
  return count ? ` ${count} simulation${count > 1 ? "s" : ""} ran beside it and took some of its time.` : "";
}

/** 1, 2 or 5 times a power of ten, not below: an axis that stays while a slider moves a little. */
function niceEnd(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((n) => n * power).find((n) => n >= value * 0.9999);
}

/** The 1-2-5 value next to one, below (Math.floor) or above (Math.ceil). */
function niceLog(value, round) {
  const power = 10 ** Math.floor(Math.log10(value) + 1e-9);
  const steps = [1, 2, 5, 10].map((n) => n * power);
  return round === Math.floor ? steps.filter((n) => n <= value * 1.0001).at(-1) * 0.98 : steps.find((n) => n >= value * 0.9999) * 1.02;
}

function logTicks(low, high, room) {
  const decades = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
  const sets = [[1, 2, 5], [1, 3], [1]].map((steps) => decades.flatMap((d) => steps.map((n) => n * d)).filter((v) => v >= low && v <= high));
  return sets.find((ticks) => ticks.length <= room) ?? sets[2].filter((_, i, all) => i % Math.ceil(all.length / room) === 0);
}

function timeAxis(a) {
  const least = a.end / Math.max(2, Math.floor((a.right - a.left) / 90));
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((t) => t >= least * 0.9999);
  const values = Array.from({ length: Math.floor(a.end / step + 1e-9) + 1 }, (_, i) => i * step);
  return values.map((v) => `<path class="pd-pl-grid" d="M${a.x(v)} ${a.top}V${a.bottom + 5}"/><text x="${a.x(v)}" y="${a.bottom + 22}" text-anchor="${a.x(v) > a.right - 14 ? "end" : "middle"}">${v ? duration(v) : "0"}</text>`).join("");
}

// ---- a lab ----------------------------------------------------------------------------------

/** A page that simulates what its controls say, and runs it for real: it has `build`, `draw` and `drawState`. */
class Lab {
  constructor(model) {
    this.model = model;
    this.asker = new Asker(model, (arrived) => (arrived ? this.drawSoon() : this.drawState()));
  }

  /** When it is built: draw what changes from here on. */
  listen(handlers) {
    const stops = [listen(this.model, handlers), onAppearance(this.root, () => this.draw()), this.asker.stop];
    this.stop = () => stops.forEach((stop) => stop());
    this.model.send({ type: "views", change: 1 });
  }

  destroy() {
    this.stop();
    clearTimeout(this.slow);
    this.model.send({ type: "views", change: -1 });
  }

  get = (name) => this.model.get(name);

  set(values) {
    this.asker.ask({ type: "set", values });
  }

  drawSoon = onceSoon(() => this.draw());

  /** For the workload's seed and the limits; `seed` has what is different about its box. */
  buildBoxes(seed = {}) {
    const box = (label, name, read, props) => h("input.pd-pl-box", { type: "text", inputmode: "decimal", "aria-label": label, onchange: (e) => this.set({ [name]: read(e.target.value) }), onkeydown: keepKeys, ...props });
    this.boxes = {
      seed: box("seed of the workload", "seed", (text) => Math.max(0, Math.round(+text) || 0), seed),
      ttft_slo_s: box("ttft limit in seconds", "ttft_slo_s", readNumber), tpot_slo_s: box("tpot limit in seconds", "tpot_slo_s", readNumber) };
  }

  /** What is being corrected, after a message, stays. */
  syncBoxes() {
    for (const [name, box] of Object.entries(this.boxes)) if (document.activeElement !== box || !this.get("message")) box.value = this.get(name);
  }

  buildReal() {
    const ask = (type) => () => this.asker.ask({ type });
    this.runButton = h("button.pd-pl-run", { type: "button", onclick: ask("run") }, ["Run it for real"]);
    this.stopButton = h("button", { type: "button", hidden: true, onclick: ask("stop") }, ["Stop"]);
    this.realText = h("span", { role: "status" });
    this.bar = h("progress", { hidden: true, "aria-label": "finished requests" });
    this.table = h("div.pd-pl-table", { hidden: true });
    return h("section.pd-pl-real", { "aria-label": "Run it for real" }, [h("div.pd-pl-realbar", {}, [this.runButton, this.stopButton, this.bar, this.realText]), this.table]);
  }
}
