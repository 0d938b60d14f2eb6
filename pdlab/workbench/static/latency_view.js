// The LatencyView: one curve a run, and how many requests stay within limits that move. Data: latency_data.py.

const BOX = { height: 400, left: 84, right: 24, top: 30, bottom: 56 };
const DASHES = ["", "9 5", "3 4", "12 4 3 4", "16 6", "6 3 2 3 2 3", "2 6", "20 4 2 4"];
const MARKED = [0.5, 0.9, 0.99];
const LIMITS = { ttft: "ttft_slo_s", tpot: "tpot_slo_s" };
const SLIDER = 1000;

function render({ model, el }) {
  const view = new LatencyView(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class LatencyView {
  constructor(model) {
    this.model = model;
    this.build();
    const draw = () => this.draw();
    this.stop = listen(model, { "change:runs": () => this.reload(), "change:metric": draw, "change:scale": draw, "change:ttft_slo_s": draw, "change:tpot_slo_s": draw });
    this.stopAppearance = onAppearance(this.plot, () => this.runs && this.draw());
  }

  destroy() {
    clearTimeout(this.saving);
    this.stop();
    this.stopAppearance();
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    const tab = (metric) => h("button", { type: "button", "data-metric": metric, onclick: () => this.push("metric", metric) }, [metric.toUpperCase()]);
    this.tabs = h("div.pd-lv-tabs", { role: "group", "aria-label": "Latency" }, ["ttft", "tpot", "itl", "e2e"].map(tab));
    this.log = h("button", { type: "button", onclick: () => this.push("scale", this.isLog ? "linear" : "log") }, ["log axis"]);
    this.sliders = { ttft: this.limitSlider("ttft"), tpot: this.limitSlider("tpot") };
    this.plot = h("div.pd-lv-plot", { onpointermove: (e) => this.hover(e), onpointerdown: (e) => this.press(e), onpointerup: () => (this.drag = false), onpointercancel: () => (this.drag = false), onpointerleave: () => this.tip.hide() });
    const [side, sideBody] = section("Within both limits", "of all requests; goodput", "pd-lv-side");
    this.tiles = h("div.pd-lv-tiles.pd-num");
    sideBody.append(this.tiles);
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-latency", { role: "group", "aria-label": "LatencyView" }, [
      h("div.pd-head", {}, [this.title]),
      h("div.pd-lv-controls", {}, [this.tabs, this.sliders.ttft.node, this.sliders.tpot.node, this.log]),
      h("div.pd-cols", {}, [this.plot, side]), this.foot]);
    this.tip = tooltip(this.root);
  }

  limitSlider(metric) {
    const name = metric.toUpperCase();
    const input = h("input", { type: "range", min: 0, max: SLIDER, step: 1, "aria-label": `${name} limit`, oninput: () => this.push(LIMITS[metric], rounded(this.secondsOf(metric, +input.value))) });
    const value = h("b.pd-num");
    return { input, value, node: h("label.pd-field", {}, [`${name} ≤`, input, value]) };
  }

  push(name, value) {
    this.model.set(name, value);
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.model.save_changes(), name in this.sliders ? 0 : 60);
    this.draw();
  }

  // ---- data -------------------------------------------------------------------------------

  reload() {
    this.runs = this.model.get("runs");
    this.spans = { ttft: this.spanOf("ttft"), tpot: this.spanOf("tpot") };
    const lines = new Map(this.runs.map((run) => [run.line, run.provenance]));
    const parts = [...lines].map(([line, kind]) => h("span", {}, [provenanceTag(kind), ` ${line.replace(/^\w+:? /, "")}`]));
    const sampled = this.runs.some((run) => this.about(run));
    clear(this.foot, ...parts, sampled ? h("span", {}, ["≈: counted on an even sample of the requests"]) : null);
    this.draw();
  }

  /** Limits that a slider reaches: half the smallest to twice the largest latency. */
  spanOf(metric) {
    const values = this.runs.flatMap((run) => run.curves[metric].seconds).filter((v) => v > 0);
    return values.length ? [Math.min(...values) / 2, Math.max(...values) * 2] : [1e-3, 10];
  }

  secondsOf(metric, place) {
    const [low, high] = this.spans[metric];
    return low * (high / low) ** (place / SLIDER);
  }

  placeOf(metric, seconds) {
    const [low, high] = this.spans[metric];
    return Math.max(0, Math.min(SLIDER, (SLIDER * Math.log(seconds / low)) / Math.log(high / low)));
  }

  get metric() {
    return this.model.get("metric");
  }

  get isLog() {
    const scale = this.model.get("scale");
    return scale === "auto" ? Boolean(this.model.get("wide")[this.metric]) : scale === "log";
  }

  limit(metric) {
    return this.model.get(LIMITS[metric]);
  }

  /** Requests of a run within both limits; of one token, only the first counts. */
  within(run) {
    const [ttft, tpot] = [this.limit("ttft"), this.limit("tpot")];
    const met = run.pairs.filter(([a, b]) => a <= ttft && (b == null || b <= tpot)).length;
    return run.pairs.length ? (met / run.pairs.length) * run.num_finished : 0;
  }

  about(run) {
    return run.pairs.length < run.num_finished ? "≈ " : "";
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    for (const tab of this.tabs.children) tab.setAttribute("aria-pressed", String(tab.dataset.metric === this.metric));
    this.log.setAttribute("aria-pressed", String(this.isLog));
    for (const [metric, { input, value }] of Object.entries(this.sliders)) {
      const seconds = this.limit(metric);
      input.value = this.placeOf(metric, seconds);
      value.textContent = duration(seconds);
      input.setAttribute("aria-valuetext", duration(seconds));
    }
    this.drawPlot();
    this.drawTiles();
    this.root.dataset.shown = `${this.metric}/${this.isLog ? "log" : "linear"}/${this.limit("ttft")}/${this.limit("tpot")}`;
  }

  axes() {
    const width = (this.width = this.plot.clientWidth || this.width || 560); // 0 while detached
    const values = this.runs.flatMap((run) => run.curves[this.metric].seconds);
    const positive = values.filter((v) => v > 0);
    const limit = LIMITS[this.metric] ? this.limit(this.metric) : 0;
    const most = Math.max(...values, 1e-6);
    const high = Math.max(most, Math.min(limit, most * 3)) * (this.isLog ? 1.25 : 1.06);
    const least = Math.min(...positive, most);
    const low = this.isLog ? Math.min(least, limit > 0 ? Math.max(limit, least / 3) : least) / 1.25 : 0;
    const [x0, x1] = [BOX.left, width - BOX.right];
    const at = this.isLog ? (s) => Math.log(Math.max(s, low) / low) / Math.log(high / low) : (s) => s / high;
    const back = this.isLog ? (p) => low * (high / low) ** p : (p) => p * high;
    return { width, low, high, x0, x1, empty: !values.length, x: (s) => x0 + at(s) * (x1 - x0), seconds: (x) => back((x - x0) / (x1 - x0)), y: (p) => BOX.height - BOX.bottom - p * (BOX.height - BOX.top - BOX.bottom) };
  }

  drawPlot() {
    const a = (this.a = this.axes());
    const what = this.metric === "itl" ? "gaps" : "requests";
    const bottom = BOX.height - BOX.bottom;
    const levels = [0, 0.5, 0.9, 0.99].map((p) => `<path class="pd-lv-grid" d="M${a.x0} ${a.y(p)}H${a.x1}"/><text x="${a.x0 - 8}" y="${a.y(p) + 5}" text-anchor="end">${p * 100} %</text>`);
    const none = `<text class="pd-strong pd-lv-none pd-lv-halo" x="${(a.x0 + a.x1) / 2}" y="${(BOX.top + bottom) / 2}" text-anchor="middle">no request has got so far</text>`;
    const body = a.empty ? none : this.timeAxis(a) + this.limitArea(a) + this.runs.map((run, i) => this.curve(a, run, i)).join("") + this.limitLine(a);
    this.plot.innerHTML = `<svg width="${a.width}" height="${BOX.height}" role="img" aria-label="${escapeText(this.describe())}">${levels.join("")}${body}
      <text transform="translate(16 ${(BOX.top + bottom) / 2}) rotate(-90)" text-anchor="middle">part of the ${what}</text><text x="${(a.x0 + a.x1) / 2}" y="${BOX.height - 6}" text-anchor="middle">${this.model.get("names")[this.metric]}${this.isLog ? " (log)" : ""}</text></svg>`;
  }

  describe() {
    return this.runs.map((run) => `${run.name}: ${this.metric.toUpperCase()} p50 ${duration(run.curves[this.metric].marked[0])}, p99 ${duration(run.curves[this.metric].marked[2])}`).join("; ");
  }

  timeAxis(a) {
    const values = this.isLog ? logTicks(a) : linearTicks(a.high, Math.max(2, Math.floor((a.x1 - a.x0) / 96)));
    return values.map((v) => `<path class="pd-lv-grid" d="M${a.x(v)} ${a.y(1)}V${a.y(0) + 5}"/><text x="${a.x(v)}" y="${a.y(0) + 22}" text-anchor="middle">${v ? duration(v) : "0"}</text>`).join("");
  }

  curve(a, run, i) {
    const { seconds, marked } = run.curves[this.metric];
    if (!seconds.length) return "";
    const steps = seconds.map((s, k) => `H${a.x(s).toFixed(1)}V${a.y((k + 1) / seconds.length).toFixed(1)}`).join("");
    const color = `var(--pd-run-${i})`;
    const dots = marked.map((s, k) => `<circle cx="${a.x(s)}" cy="${a.y(MARKED[k])}" r="5.5" fill="${color}"/>`).join("");
    return `<path class="pd-lv-curve" data-run="${escapeText(run.name)}" stroke="${color}" stroke-dasharray="${DASHES[i]}" d="M${a.x0} ${a.y(0)}${steps}H${a.x1}"/>${dots}`;
  }

  limitArea(a) {
    if (!LIMITS[this.metric]) return "";
    const x = Math.max(a.x0, Math.min(a.x1, a.x(this.limit(this.metric))));
    return `<rect class="pd-lv-late" x="${x}" y="${a.y(1)}" width="${a.x1 - x}" height="${a.y(0) - a.y(1)}"/>`;
  }

  limitLine(a) {
    if (!LIMITS[this.metric]) return "";
    const limit = this.limit(this.metric);
    const x = Math.max(a.x0, Math.min(a.x1, a.x(limit)));
    const anchor = x < a.x0 + 90 ? "start" : x > a.x1 - 60 ? "end" : "middle";
    const y = a.y(0.25);
    return `<path class="pd-lv-limit" d="M${x} ${a.y(1) - 6}V${a.y(0)}"/><path class="pd-lv-grip" d="M${x - 4} ${y - 9}v18M${x + 4} ${y - 9}v18"/><rect class="pd-lv-handle" x="${x - 14}" y="${a.y(1) - 12}" width="28" height="${a.y(0) - a.y(1) + 12}"/>
      <text class="pd-strong pd-lv-halo" x="${x}" y="${a.y(1) - 12}" text-anchor="${anchor}">limit ${duration(limit)}</text>`;
  }

  drawTiles() {
    const parts = this.runs.map((run) => (run.num_requests ? this.within(run) / run.num_requests : 0));
    const rates = this.runs.map((run) => this.within(run) / (run.duration_s || Infinity));
    const top = rates.indexOf(Math.max(...rates));
    clear(this.tiles, ...this.runs.map((run, i) => this.tile(run, i, rates[top])));
    const name = this.runs.length > 1 ? `${this.runs[top].name}: ` : "";
    const all = this.runs.every((run) => !run.num_finished);
    this.title.textContent = all ? "No request has finished" : `${name}${this.about(this.runs[top])}${percent(parts[top])} of the requests within TTFT ${duration(this.limit("ttft"))} and TPOT ${duration(this.limit("tpot"))}`;
  }

  tile(run, i, best) {
    const met = this.within(run);
    const part = run.num_requests ? met / run.num_requests : null;
    const rate = run.duration_s ? met / run.duration_s : null;
    const about = this.about(run);
    const line = h("i.pd-lv-line");
    line.innerHTML = `<svg viewBox="0 0 34 10"><path class="pd-lv-curve" stroke="var(--pd-run-${i})" stroke-dasharray="${DASHES[i]}" d="M0 5H34"/></svg>`;
    const bar = (share, label) => h("div.pd-lv-bar", { role: "img", "aria-label": label }, [h("i", { style: `width:${100 * (share || 0)}%;background:var(--pd-run-${i})` })]);
    const { marked } = run.curves[this.metric];
    const quantile = (k) => h("span", {}, [`p${100 * MARKED[k]} `, h("b", {}, [duration(marked[k])])]);
    const unfinished = run.num_requests - run.num_finished;
    return h("div.pd-lv-tile", { "data-run": run.name }, [
      h("div.pd-lv-name", {}, [line, h("b", {}, [run.name]), unfinished ? h("span.pd-hint", {}, [`${unfinished} of ${run.num_requests} not finished`]) : null]),
      h("div.pd-lv-big", {}, [h("b", {}, [part == null ? "–" : about + percent(part)]), bar(part, "attainment")]),
      h("div.pd-lv-big.pd-lv-rate", {}, [h("b", {}, [rate == null ? "–" : about + digits(rate), h("small", {}, [" req/s"])]), this.runs.length > 1 ? bar(best ? rate / best : 0, "goodput") : null]),
      h("div.pd-lv-marked", {}, [h("span", {}, [this.metric.toUpperCase()]), ...MARKED.map((_, k) => quantile(k))]),
    ]);
  }

  // ---- pointing ---------------------------------------------------------------------------

  press(event) {
    if (!LIMITS[this.metric] || !event.target.classList.contains("pd-lv-handle")) return this.hover(event);
    this.drag = true;
    this.plot.setPointerCapture(event.pointerId);
    event.preventDefault();
  }

  hover(event) {
    if (this.a.empty) return;
    const seconds = this.a.seconds(Math.max(this.a.x0 + 1, Math.min(this.a.x1, event.clientX - this.plot.getBoundingClientRect().left)));
    if (this.drag) return this.tip.hide(), this.push(LIMITS[this.metric], rounded(seconds));
    const share = (run) => {
      const all = run.curves[this.metric].seconds;
      return all.length ? all.filter((s) => s <= seconds).length / all.length : null;
    };
    this.tip.show(event, [`${this.metric.toUpperCase()} within ${duration(seconds)}`, ...this.runs.map((run) => `${run.name}: ${share(run) == null ? "–" : percent(share(run))}`)]);
  }
}

const rounded = (seconds) => Number(seconds.toPrecision(3));
/** 0.995 -> "99.5 %": never 100 % where something is missing, nor 0 % where there is something. */
function percent(part) {
  const whole = Math.round(part * 100);
  return (whole === 100 && part < 1) || (whole === 0 && part > 0) ? `${(Math.floor(part * 1000) / 10 || 0.1).toFixed(1)} %` : `${whole} %`;
}
const escapeText = (t) => t.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function linearTicks(high, count) {
  const least = high / count;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((t) => t >= least * 0.9999);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

/** 1, 2 and 5 in each decade, or as many of them as there is room for. */
function logTicks({ low, high, x }) {
  const decades = Array.from({ length: Math.ceil(Math.log10(high / low)) + 2 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
  const sets = [[1, 2, 5], [1, 3], [1]].map((steps) => decades.flatMap((d) => steps.map((n) => n * d)).filter((v) => v >= low && v <= high));
  const apart = (ticks) => ticks.every((v, i) => !i || x(v) - x(ticks[i - 1]) > 58);
  return sets.find(apart) ?? [low, high];
}

export default { render };
