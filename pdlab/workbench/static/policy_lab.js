// The PolicyLab: controls, big numbers beside a pinned run, a timeline, TTFT as a curve, and a run for real.
// Data: policy_lab_data.py.

const BUDGETS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
const CHUNKS = [16, 32, 64, 128, 256, 512, 1024, 2048, null]; // null: the whole budget
const SEATS = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const MODE_NAMES = { static: "static", prefill_first: "prefill first", decode_first: "decode first", mixed: "mixed" };
const MODE_HINTS = {
  static: "a batch starts when nothing runs, and nobody joins until all of it has finished",
  prefill_first: "a step holds prompts or decodes; prompts first",
  decode_first: "a step holds prompts or decodes; decodes first",
  mixed: "a step holds all decodes, and prompt chunks up to the token budget",
};
const POLICY_HINTS = {
  fcfs: "first come, first served", sjf: "shortest prompt first", priority: "lowest number first, with ageing",
  deadline: "earliest TTFT limit that can still be met first", longest_prefix: "most tokens in the prefix cache first; these prompts share none, so as fcfs",
};
const SETTING_NAMES = {
  batching: "batching", policy: "policy", max_num_batched_tokens: "token budget", chunk_size: "chunk", max_num_seqs: "seats", rate_rps: "rate",
  workload: "workload", seed: "seed", machine: "step times of", ttft_slo_s: "TTFT limit", tpot_slo_s: "TPOT limit",
};
const KIND_COLORS = ["waiting", "prefill", "decode", "stalled", "preempted"];
const [STALLED, PREEMPTED] = [3, 4];
const PLOT = { left: 46, right: 16, top: 8, bottom: 28, height: 208 };

function render({ model, el }) {
  const view = new PolicyLab(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.destroy();
}

class PolicyLab extends Lab {
  constructor(model) {
    super(model);
    this.build();
    const draw = () => this.asker.asked === null && this.drawSoon(); // else once, when the answer is complete
    this.listen({ "change:result": draw, "change:pinned": draw, "change:message": draw, "change:policies": draw, "change:real": () => this.drawReal() });
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.state = h("span.pd-pill", { role: "status", hidden: true }, ["simulating …"]);
    this.message = h("div.pd-pl-message", { role: "alert", hidden: true });
    this.tiles = h("div.pd-pl-tiles.pd-num");
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-lab.pd-policy-lab", { role: "group", "aria-label": "Policy lab" }, [
      h("div.pd-head", {}, [this.title, this.state]), this.message, this.buildControls(), this.buildPin(), this.tiles,
      h("div.pd-pl-plots", {}, [this.buildTimeline(), this.buildCurve()]), this.buildReal(), this.foot]);
  }

  buildControls() {
    const { workloads, machines } = this.get("header");
    this.batching = radios("batching", (value) => this.set({ batching: value }));
    this.policy = radios("policy", (value) => this.set({ policy: value }), "your own policy");
    this.batching.sync(this.get("header").batching, MODE_NAMES, MODE_HINTS);
    this.workload = choice("workload", Object.keys(workloads), (value) => this.set({ workload: value }));
    this.machine = choice("machine", machines, (value) => this.set({ machine: value }));
    this.sliders = [
      slider("token budget", "max_num_batched_tokens: most tokens that one step computes", BUDGETS, (v) => this.set({ max_num_batched_tokens: v }), (v) => v.toLocaleString("en")),
      slider("chunk", "chunk_size: most prompt tokens of one request in a step", CHUNKS, (v) => this.set({ chunk_size: v }), (v) => (v === null ? "budget" : v.toLocaleString("en"))),
      slider("seats", "max_num_seqs: most requests that run at once", SEATS, (v) => this.set({ max_num_seqs: v }), String),
      slider("rate", "requests a second that arrive", [], (v) => this.set({ rate_rps: v }), (v) => `${rateText(v)}/s`),
    ];
    this.buildBoxes({ type: "number", min: 0, step: 1 });
    return h("div.pd-pl-controls", {}, [
      h("div.pd-pl-radios", {}, [group("batching", this.batching.node), group("policy", this.policy.node)]),
      h("div.pd-pl-sliders", {}, this.sliders.map((s) => s.node)),
      h("div.pd-pl-choices", {}, [group("workload", this.workload), group("seed", this.boxes.seed), group("step times of", this.machine)])]);
  }

  buildPin() {
    const button = (text, title, question) => h("button", { type: "button", title, onclick: () => this.asker.ask({ type: question }) }, [text]);
    this.pinButton = button("Pin this run", "Compare with these settings from here on", "pin");
    this.unpinButton = button("Unpin", "Compare with nothing", "unpin");
    this.pinText = h("span");
    return h("div.pd-pl-pin", {}, [this.pinButton, this.unpinButton, this.pinText]);
  }

  buildTimeline() {
    const [node, body] = section("Timeline", null, "pd-pl-timeline");
    this.views = radios("timeline", (value) => this.asker.ask({ type: "view", view: value }));
    this.views.sync(["requests", "load"], { requests: "first requests", load: "load over time" }, { requests: "a row each", load: "waiting, and computed in a step" });
    this.timelineTitle = node.firstChild;
    this.timelineTitle.append(this.views.node);
    this.timeline = h("div.pd-pl-plot");
    this.legend = h("div.pd-legend");
    body.append(this.timeline, this.legend);
    return node;
  }

  buildCurve() {
    const [node, body] = section("TTFT", "part of all requests; dashed: pinned", "pd-pl-curve");
    this.curve = h("div.pd-pl-plot");
    body.append(this.curve, h("div.pd-pl-slo", {}, [h("span", {}, ["limits:"]), h("label", {}, ["TTFT ≤", this.boxes.ttft_slo_s, "s"]), h("label", {}, ["TPOT ≤", this.boxes.tpot_slo_s, "s"])]));
    return node;
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    const result = this.get("result");
    if (!result.numbers) return;
    this.drawState();
    this.drawMessage(result);
    this.drawTitle(result);
    this.syncControls();
    this.drawTiles(result);
    this.drawTimeline(result);
    this.drawCurve(result);
    this.drawReal();
    clear(this.foot, provenanceTag("simulated"), h("span", {}, [result.provenance]), h("span", {}, [`${result.num_requests} requests; the scheduler is the engine's own`]));
    this.root.dataset.answered = this.get("answered");
    this.root.dataset.line = result.line;
  }

  drawState() {
    const busy = this.asker.isBusy;
    this.root.setAttribute("aria-busy", String(busy));
    clearTimeout(this.slow);
    this.state.hidden = true;
    if (busy) this.slow = setTimeout(() => (this.state.hidden = !this.asker.isBusy), 300); // a short wait needs no word
  }

  drawMessage(result) {
    const refused = result.num_refused ? `${result.num_refused} of ${result.num_requests} requests were refused: ${result.error}` : "";
    const message = this.get("message");
    this.message.textContent = message ? `${message}. The last run is still shown.` : refused;
    this.message.hidden = !this.message.textContent;
  }

  drawTitle({ numbers, num_requests: all, settings: s, num_preemptions: lost }) {
    const met = Math.round((numbers.attainment ?? 0) * all);
    clear(this.title, h("b", {}, [`${met} of ${all} requests`]), ` within TTFT ${duration(s.ttft_slo_s)} and TPOT ${duration(s.tpot_slo_s)}`, lost ? h("span.pd-hint", {}, [` ${lost} preemptions`]) : null);
  }

  syncControls() {
    const names = this.get("policies");
    this.policy.sync(names, Object.fromEntries(names.map((n) => [n, n.replaceAll("_", " ")])), POLICY_HINTS);
    for (const name of ["batching", "policy", "view"]) (name === "view" ? this.views : this[name]).choose(this.get(name));
    for (const name of ["workload", "machine"]) this[name].value = this.get(name);
    this.workload.title = this.get("header").workloads[this.get("workload")];
    this.sliders[3].values = ratesAround(this.get("header").usual_rates[this.get("machine")]);
    const traits = ["max_num_batched_tokens", "chunk_size", "max_num_seqs", "rate_rps"];
    if (!this.asker.isBusy) this.sliders.forEach((s, i) => s.sync(this.get(traits[i])));
    this.syncBoxes();
  }

  drawTiles({ numbers, settings }) {
    const pinned = this.get("pinned");
    const has = Boolean(pinned.numbers);
    this.unpinButton.disabled = !has;
    clear(this.pinText, ...(has ? this.pinWords(pinned.settings, settings) : ["no run is pinned: nothing to compare with"]));
    const tile = ([key, label, unit]) => {
      const value = numbers[key];
      const better = unit === "s" ? -1 : 1;
      const change = has ? changeText(value, pinned.numbers[key], better) : null;
      const shown = unit === "s" ? duration(value).split(" ") : [digitsOf(value), unit];
      return h("div.pd-pl-tile", { "data-key": key }, [h("span.pd-pl-label", {}, [label]), h("b.pd-pl-value", {}, [shown[0], h("small", {}, [` ${shown[1] ?? ""}`])]), change ?? h("span.pd-pl-change", {}, [" "])]);
    };
    clear(this.tiles, ...this.get("header").numbers.map(tile));
  }

  /** What is different about the pinned run. */
  pinWords(pinned, now) {
    const text = (name, value) => (name === "chunk_size" && value === null ? "whole budget" : String(MODE_NAMES[value] ?? value).replaceAll("_", " "));
    const other = Object.keys(SETTING_NAMES).filter((name) => pinned[name] !== now[name]);
    if (!other.length) return ["This is the pinned run: change something, and each number says how it changes."];
    return ["compared with the pinned run: ", h("b", {}, [other.map((name) => `${SETTING_NAMES[name]} ${text(name, pinned[name])}`).join(", ")])];
  }

  // ---- timeline ---------------------------------------------------------------------------

  drawTimeline({ timeline }) {
    const { view } = timeline;
    const width = this.timeline.clientWidth || 520;
    const end = niceEnd(timeline.end_s);
    const a = { width, top: PLOT.top, left: view === "load" ? PLOT.left : 14, right: width - PLOT.right, bottom: PLOT.height - PLOT.bottom, end };
    a.x = (s) => a.left + (s / end) * (a.right - a.left);
    const inner = view === "load" ? this.loadPaths(a, timeline) : this.rowPaths(a, timeline);
    this.timeline.innerHTML = `<svg width="${width}" height="${PLOT.height}" role="img" aria-label="${view === "load" ? "waiting requests and batch over time" : `the first ${timeline.rows.length} requests over time`}">${timeAxis(a)}${inner}</svg>`;
    const key = (style, text) => h("span", {}, [h("i.pd-swatch", { style }), text]);
    const color = (name) => `background:var(--pd-${name})`;
    if (view === "load") clear(this.legend, key(color("waiting"), "waiting for their first step"), key(color("decode"), "computed in a step (mean)"));
    else clear(this.legend, key(color("waiting"), "waits"), key(color("prefill"), "prefill"), key(color("decode"), "decode"), key("border-top:2px dotted var(--pd-text);height:0", "stalled"), timeline.rows.some((r) => r.spans.some((s) => s[0] === PREEMPTED)) ? key(color("preempted"), "preempted") : null, h("span", {}, ["✕ missed a limit"]));
  }

  /** One path for each kind of span over all rows. */
  rowPaths(a, { rows }) {
    const height = (a.bottom - PLOT.top) / Math.max(rows.length, 1);
    const paths = KIND_COLORS.map(() => []);
    const marks = [];
    rows.forEach((row, i) => {
      const middle = PLOT.top + (i + 0.5) * height;
      const half = (kind) => height * (kind === 0 ? 0.12 : kind === PREEMPTED ? 0.25 : 0.4);
      for (const [kind, start, stop] of row.spans) {
        const x0 = a.x(start);
        const x1 = Math.max(a.x(stop), x0 + (kind === 1 ? 1.6 : 0.6));
        if (kind === STALLED) paths[kind].push(`M${x0.toFixed(1)} ${middle.toFixed(1)}H${x1.toFixed(1)}`);
        else paths[kind].push(`M${x0.toFixed(1)} ${(middle - half(kind)).toFixed(1)}H${x1.toFixed(1)}v${(2 * half(kind)).toFixed(1)}H${x0.toFixed(1)}z`);
      }
      const last = row.spans.at(-1);
      if (row.met === false && last) marks.push(`M${a.x(last[2]) + 3} ${middle - 3}l6 6m0 -6l-6 6`);
    });
    const filled = (kind) => (paths[kind].length ? `<path data-kind="${KIND_COLORS[kind]}" fill="var(--pd-${KIND_COLORS[kind]})" d="${paths[kind].join("")}"/>` : "");
    return `${filled(0)}<path class="pd-pl-stall" d="${paths[STALLED].join("")}"/>${filled(1)}${filled(2)}${filled(PREEMPTED)}<path class="pd-pl-missed" d="${marks.join("")}"/>`;
  }

  loadPaths(a, { queue, batch, end_s: end }) {
    const most = niceEnd(Math.max(...queue, ...batch, 1));
    const y = (v) => a.bottom - (v / most) * (a.bottom - PLOT.top);
    const x = (i) => a.x((i / queue.length) * end).toFixed(1);
    const steps = (values) => values.map((v, i) => `V${y(v).toFixed(1)}H${x(i + 1)}`).join("");
    const levels = [0, most / 2, most].filter(Number.isInteger).map((v) => `<path class="pd-pl-grid" d="M${a.left} ${y(v)}H${a.right}"/><text x="${a.left - 8}" y="${y(v) + 5}" text-anchor="end">${digits(v)}</text>`);
    return `${levels.join("")}<path fill="var(--pd-waiting)" opacity="0.55" d="M${a.left} ${a.bottom}${steps(queue)}V${a.bottom}z"/><path class="pd-pl-batch" d="M${a.left} ${a.bottom}${steps(batch)}"/>`;
  }

  // ---- the curve --------------------------------------------------------------------------

  drawCurve({ cdf, settings, num_requests: all }) {
    const pinned = this.get("pinned");
    const width = this.curve.clientWidth || 340;
    const curves = [pinned.cdf, cdf];
    const limit = settings.ttft_slo_s;
    const values = [...curves.flatMap((c) => (c ? [c[0][0], c[0].at(-1)] : [])), limit].filter((v) => v > 0);
    const [low, high] = [niceLog(Math.min(...values), Math.floor), niceLog(Math.max(...values), Math.ceil)];
    const a = { left: PLOT.left + 8, right: width - PLOT.right, bottom: PLOT.height - PLOT.bottom, top: PLOT.top + 16 };
    const x = (s) => a.left + (Math.log(Math.max(s, low) / low) / Math.log(high / low)) * (a.right - a.left);
    const y = (p) => a.bottom - p * (a.bottom - a.top);
    const levels = [0, 0.5, 0.9, 1].map((p) => `<path class="pd-pl-grid" d="M${a.left} ${y(p)}H${a.right}"/><text x="${a.left - 8}" y="${y(p) + 5}" text-anchor="end">${p * 100} %</text>`);
    const ticks = logTicks(low, high, (a.right - a.left) / 58).map((v) => `<path class="pd-pl-grid" d="M${x(v)} ${a.top}V${a.bottom + 5}"/><text x="${x(v)}" y="${a.bottom + 22}" text-anchor="middle">${duration(v)}</text>`);
    const line = (c, num, cls) => (c ? `<path class="${cls}" d="M${a.left} ${y(0)}${c[0].map((s, i) => `H${x(s).toFixed(1)}V${y((c[1][i] * c[0].length) / Math.max(num, c[0].length)).toFixed(1)}`).join("")}H${a.right}"/>` : "");
    const anchor = x(limit) < a.left + 50 ? "start" : x(limit) > a.right - 50 ? "end" : "middle";
    this.curve.innerHTML = `<svg width="${width}" height="${PLOT.height}" role="img" aria-label="TTFT of the requests as a curve, limit ${duration(limit)}">${levels.join("")}${ticks.join("")}<rect class="pd-pl-late" x="${x(limit)}" y="${a.top}" width="${Math.max(0, a.right - x(limit))}" height="${a.bottom - a.top}"/>
      ${line(pinned.cdf, pinned.num_requests, "pd-pl-old")}${line(cdf, all, "pd-pl-line")}<path class="pd-pl-limit" d="M${x(limit)} ${a.top - 5}V${a.bottom}"/><text class="pd-strong" x="${x(limit)}" y="${a.top - 9}" text-anchor="${anchor}">limit ${duration(limit)}</text></svg>`;
  }

  // ---- for real ---------------------------------------------------------------------------

  drawReal() {
    const real = this.get("real");
    const { num_real: num, here } = this.get("header");
    const running = real.state === "running";
    const possible = here.includes(this.get("machine"));
    this.runButton.disabled = running || !possible;
    this.runButton.textContent = `Run it for real: first ${num} requests`;
    this.runButton.title = possible ? "On the engine, in real time, beside the simulation of exactly these requests" : "Needs a model, and this machine";
    this.stopButton.hidden = this.bar.hidden = !running;
    this.bar.max = real.num ?? 1;
    this.bar.value = real.finished ?? 0;
    clear(this.realText, ...this.realWords(real, possible));
    this.table.hidden = real.state !== "done";
    if (real.state === "done") this.drawTable(real);
    this.root.dataset.real = real.state;
  }

  realWords(real, possible) {
    if (real.state === "running") return [`${real.finished} of ${real.num} finished, ${digits(real.now_s)} s of about ${digits(real.takes_s)} s`];
    if (real.state === "stopped") return [`Stopped after ${real.finished} of ${real.num} requests: no numbers.`];
    if (real.state === "failed") return [h("b", {}, [`It failed: ${real.error}`])];
    if (real.state === "done") return [];
    return [possible ? `in real time: about ${digits(this.get("result").real_s)} s, on an engine of its own` : this.get("header").here.length ? "choose this machine for it" : "needs a model: PolicyLab(model)"];
  }

  drawTable(real) {
    clear(this.table, comparison([{ rows: real.rows }]),
      h("div.pd-hint", {}, [`First ${real.num} of ${real.of} requests: ${real.line}. ${real.measured}; ${real.simulated}.${besideText(real.beside)}`]));
  }
}

export default { render };
