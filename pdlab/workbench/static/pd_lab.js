// The PDLab: controls, three ways of serving beside each other, their timelines and waits, and a run for real.
// Data: pd_lab_data.py.

const PLOT = { left: 34, right: 48, bottom: 24 };
const LANES = { most: 16, least: 7, gap: 2, title: 19, height: 68 }; // of each way, in pixels
const RANGE = { left: 14, right: 26, row: 17, top: 20, bottom: 22 };
const MEASURED = "measured"; // of header.views
const [PREFILL, DECODE, MIXED] = [0, 1, 2]; // as header.mixes has them
const LEGEND = [["prefill", "prompts"], ["decode", "outputs"]];

function render({ model, el }) {
  const view = new PDLab(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.destroy();
}

class PDLab extends Lab {
  constructor(model) {
    super(model);
    this.modes = this.get("header").modes;
    this.build();
    const draw = () => this.asker.asked === null && this.drawSoon(); // controls, once the answer is complete
    this.listen({
      "change:results": () => this.drawSoon(), "change:about": draw, "change:message": draw, "change:chosen": draw, "change:view": draw, "change:workloads": draw,
      "change:progress": () => this.drawState(), "change:real": () => this.drawReal(), "change:reals": () => this.drawSoon(),
    });
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.state = h("span.pd-pill", { role: "status", hidden: true });
    this.message = h("div.pd-pl-message", { role: "alert", hidden: true });
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-lab.pd-disagg-lab", { role: "group", "aria-label": "Prefill and decode lab" }, [
      h("div.pd-head", {}, [this.title, this.state]), this.message, this.buildControls(), this.buildCards(),
      h("div.pd-dl-plots.pd-pl-plots", {}, [this.buildTimeline(), this.buildRanges(), this.buildWaits()]), this.buildReal(), this.foot]);
  }

  buildControls() {
    const header = this.get("header");
    const size = (v) => (v === null ? "whole" : v.toLocaleString("en"));
    this.ratio = slider("P:D ratio", "devices for prompts and devices for outputs", [], (v) => this.set({ num_prefill: v }), (v) => this.ratioText(v));
    this.advice = h("button.pd-dl-advice", { type: "button", onclick: () => this.asker.ask({ type: "advice" }) });
    this.prefillChunk = slider("chunk on P", "prefill_chunk: most tokens of one prompt in a step of a worker that has only prompts", header.prefill_chunks, (v) => this.set({ prefill_chunk: v }), size);
    this.decodeChunk = slider("chunk on D", "decode_chunk: most tokens in a step that has outputs and prompts: of chunked, and of workers for outputs that compute short prompts", [], (v) => this.set({ decode_chunk: v }), size);
    this.rate = slider("rate", "requests a second, for all devices together", [], (v) => this.set({ rate_rps: v }), (v) => `${digits(v)}/s`);
    const read = (name, values) => values ?? Object.keys(this.get(`${name}s`));
    const pick = (label, name, values, text = (v) => v) => {
      const node = h("select", { "aria-label": label, onchange: () => this.set({ [name]: read(name, values)[node.selectedIndex] }) });
      return { name, node, text, values: () => read(name, values), box: group(label, node) };
    };
    this.picks = [
      pick("workload", "workload", null, (v) => v.split("/").at(-1)), pick("devices", "num_devices", header.num_devices, String), pick("times of", "machine", header.machines),
      pick("link", "link", header.links), pick("K and V go", "transfer", header.transfers, (v) => TRANSFER_NAMES[v] ?? v),
      pick("prompts on D", "local_prefill_tokens", header.local_tokens, (v) => (v ? `up to ${v}` : "none"))];
    this.buildBoxes();
    const limits = h("div.pd-pl-slo", {}, [h("label", {}, ["TTFT ≤", this.boxes.ttft_slo_s, "s"]), h("label", {}, ["TPOT ≤", this.boxes.tpot_slo_s, "s"]), h("label", {}, ["seed", this.boxes.seed])]);
    return h("div.pd-pl-controls", {}, [
      h("div.pd-pl-sliders", {}, [h("div.pd-dl-ratio", {}, [this.ratio.node, this.advice]), ...[this.prefillChunk, this.decodeChunk, this.rate].map((s) => s.node)]),
      h("div.pd-pl-choices", {}, [...this.picks.map((p) => p.box), limits])]);
  }

  /** One card a way; choosing one chooses what is run for real. */
  buildCards() {
    const group = uniqueId("way");
    this.cards = this.modes.map(([mode, hint], i) => {
      const card = { mode, name: h("b"), badge: h("span.pd-dl-badge"), value: h("span.pd-pl-value"), lines: h("div.pd-dl-lines.pd-num") };
      card.input = h("input", { type: "radio", name: group, value: mode, "aria-label": hint, onchange: () => this.asker.ask({ type: "chosen", chosen: mode }) });
      card.node = h("label.pd-dl-card", { title: hint, "data-mode": mode, style: `--way: var(--pd-run-${i})` }, [
        card.input, h("div.pd-dl-name", {}, [h("i.pd-swatch"), card.name, card.badge]), h("div.pd-dl-big", {}, [card.value]), card.lines]);
      return card;
    });
    return h("div.pd-dl-cards", { role: "radiogroup", "aria-label": "ways of serving; the chosen one is run for real" }, this.cards.map((c) => c.node));
  }

  buildTimeline() {
    const [node, body] = section("Workers", null, "pd-dl-timeline");
    this.views = radios("timeline", (value) => this.asker.ask({ type: "view", view: value }));
    node.firstChild.append(this.views.node);
    this.timeline = h("div.pd-pl-plot");
    const key = ([color, text]) => h("span", {}, [h("i.pd-swatch", { style: `background:var(--pd-${color})` }), text]);
    const arrow = h("span", {}, [h("i.pd-dl-arrowkey"), "K and V"]);
    body.append(this.timeline, h("div.pd-legend", {}, [...LEGEND.map(key), arrow]));
    return node;
  }

  buildRanges() {
    const [node, body] = section("Latencies", "● p50, ◆ p90, ┃ p99", "pd-dl-ranges");
    this.ranges = { ttft: h("div.pd-pl-plot"), tpot: h("div.pd-pl-plot"), itl: h("div.pd-pl-plot") };
    body.append(...Object.values(this.ranges));
    return node;
  }

  buildWaits() {
    const [node, body] = section("A request's time", "mean", "pd-dl-waits");
    this.waits = h("div.pd-dl-bars");
    this.words = h("div.pd-dl-words");
    this.waitsKey = h("div.pd-legend");
    body.append(this.waits, this.waitsKey, this.words);
    return node;
  }

  // ---- drawing ----------------------------------------------------------------------------

  ratioText = (p) => `${p}P${this.get("num_devices") - p}D`;

  /** Those that are there already: while the first ones are simulated, not all are. */
  get shown() {
    const results = this.get("results");
    return this.modes.map(([mode], i) => ({ mode, i, result: results[mode] })).filter((each) => each.result);
  }

  /** The run for real that is shown, with its simulation; none in the other views. */
  get real() {
    const reals = this.get("view") === MEASURED ? this.get("reals") : [];
    return reals.find((each) => each.mode === this.get("chosen")) ?? reals.at(-1);
  }

  /** What the plots show: the ways, or what one of them did for real and its simulation. */
  get plotted() {
    const i = this.modes.findIndex(([mode]) => mode === this.real?.mode);
    return this.real ? this.real.pictures.map((result, n) => ({ mode: this.real.mode, i, result, hollow: n > 0 })) : this.shown;
  }

  draw() {
    if (!this.get("about").settings) return;
    this.drawState();
    this.drawMessage();
    this.syncControls();
    this.drawCards();
    this.drawTimeline();
    this.drawRange("ttft", "TTFT", this.get("ttft_slo_s"));
    this.drawRange("tpot", "TPOT", this.get("tpot_slo_s"));
    this.drawRange("itl", "ITL", null);
    this.drawWaits();
    this.drawReal();
    const { provenance, settings } = this.get("about");
    const words = [provenance, `${settings.num_requests} requests each; router and schedulers are the real ones`, this.get("about").cut];
    clear(this.foot, provenanceTag("simulated"), h("span", {}, [words.filter(Boolean).join("; ")]));
    this.root.dataset.answered = this.get("answered");
    this.root.dataset.line = this.get("results")[this.get("chosen")]?.line ?? "";
  }

  drawState() {
    const busy = this.asker.isBusy;
    const { done, of, left } = this.get("progress");
    this.root.setAttribute("aria-busy", String(busy));
    for (const card of this.cards) card.node.toggleAttribute("data-stale", Boolean(left?.includes(card.mode)));
    this.root.dataset.progress = of ? `${done}/${of}` : "";
    const name = left && left[0];
    this.state.textContent = of ? `simulating ${name}, ${done + 1} of ${of} …` : "simulating …";
    if (!busy && !of) {
      clearTimeout(this.slow);
      this.slow = null;
      this.state.hidden = true;
    } else this.slow ??= setTimeout(() => (this.state.hidden = !this.asker.isBusy && !this.get("progress").of), 120); // a short wait needs no word
  }

  drawMessage() {
    const refused = this.shown.find(({ result }) => result.num_refused)?.result;
    const message = this.get("message");
    if (message) this.message.textContent = `${message}. The last runs are still shown.`;
    else this.message.textContent = refused ? `${refused.name}: ${refused.num_refused} requests were refused: ${refused.error}` : "";
    this.message.hidden = !this.message.textContent;
  }

  syncControls() {
    const header = this.get("header");
    const [machine, count] = [this.get("machine"), this.get("num_devices")];
    const usual = header.usual_rates[machine] * count;
    this.ratio.values = Array.from({ length: count - 1 }, (_, i) => i + 1);
    this.ratio.node.querySelector("input").disabled = count === 2;
    this.decodeChunk.values = header.decode_chunks[machine];
    this.rate.values = ratesAround(usual);
    const traits = [[this.ratio, "num_prefill"], [this.prefillChunk, "prefill_chunk"], [this.decodeChunk, "decode_chunk"], [this.rate, "rate_rps"]];
    if (!this.asker.isBusy) for (const [s, name] of traits) s.sync(this.get(name));
    for (const { name, node, text, values } of this.picks) {
      if (node.options.length !== values().length) clear(node, ...values().map((v) => h("option", { value: v }, [text(v)])));
      node.selectedIndex = values().indexOf(this.get(name));
    }
    this.syncBoxes();
    this.picks[0].node.title = this.get("workloads")[this.get("workload")];
    const { advice, advice_words: words } = this.get("about");
    this.advice.textContent = advice === this.get("num_prefill") ? "✓ advised" : `advised: ${this.ratioText(advice)}`;
    this.advice.title = words;
    this.advice.disabled = advice === this.get("num_prefill");
    const views = header.views.filter((v) => v !== MEASURED || this.get("reals").length);
    this.views.sync(views, Object.fromEntries(header.views.map((v) => [v, v])), { [MEASURED]: "what was run for real, and the simulation of exactly these requests" });
    this.views.choose(this.get("view"));
  }

  drawCards() {
    const best = Math.max(...this.shown.map(({ result }) => result.numbers.goodput));
    const winners = this.shown.filter(({ result }) => result.numbers.goodput > 0.97 * best);
    const all = this.get("about").settings.num_requests;
    for (const { mode, result } of this.shown) {
      const card = this.cards.find((c) => c.mode === mode);
      const n = result.numbers;
      card.name.textContent = result.name;
      const wins = best > 0 && winners.some((w) => w.mode === mode);
      card.badge.textContent = wins ? (winners.length > 1 ? "tied" : "best") : "";
      card.node.toggleAttribute("data-best", wins);
      card.input.checked = mode === this.get("chosen");
      clear(card.value, digits(n.goodput), h("small", {}, [" req/s a device in limits"]));
      const moved = n.num_transfers ? `${quantity(n.kv_bytes, "B")} of K and V moved, ${quantity(n.kv_bytes / n.num_transfers, "B")} each` : "no K and V moved";
      clear(card.lines, h("div", {}, [`${Math.round((100 * n.met) / all)} % in limits, ${quantity(n.throughput)} tokens/s out`.replace("  ", " ")]), h("div", {}, [moved]));
    }
    const { ttft_slo_s: ttft, tpot_slo_s: tpot } = this.get("about").settings;
    const top = winners.length === 1 ? winners[0].result.name : "";
    clear(this.title, top ? h("b", {}, [`${top} serves most`]) : h("b", {}, [best > 0 ? "No way serves clearly most" : "No way meets the limits"]), ` within TTFT ${duration(ttft)} and TPOT ${duration(tpot)}`);
  }

  // ---- timeline ---------------------------------------------------------------------------

  drawTimeline() {
    const width = this.timeline.clientWidth || 560;
    const end = Math.max(...this.plotted.map(({ result }) => result.end_s));
    const a = { left: PLOT.left, right: width - PLOT.right, top: 0, end: this.get("view") === this.get("header").views[0] ? end : niceEnd(end) };
    const height = (LANES.height * this.shown.length) / this.plotted.length;
    a.x = (s) => a.left + (Math.min(s, a.end) / a.end) * (a.right - a.left);
    const parts = [];
    const marker = uniqueId("head");
    let y = 0;
    for (const { result, i, hollow } of this.plotted) {
      const lane = Math.max(LANES.least, Math.min(LANES.most, (height - 4) / result.lanes.length - LANES.gap));
      parts.push(`<rect x="1" y="${y + 4}" width="11" height="11" rx="2" ${paint(i, hollow)}/><text class="pd-strong" x="19" y="${y + 14}">${result.name}</text>`);
      y += LANES.title;
      parts.push(this.lanePaths(a, result, y, lane, marker));
      y += result.lanes.length * (lane + LANES.gap) + 6;
    }
    parts.push(`<text x="${a.right + 6}" y="14">busy</text>`);
    a.bottom = y;
    const head = `<defs><marker id="${marker}" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z" fill="var(--pd-transfer)"/></marker></defs>`;
    this.timeline.innerHTML = `<svg width="${width}" height="${y + PLOT.bottom}" role="img" aria-label="steps of each worker over time">${head}${timeAxis(a)}${parts.join("")}</svg>`;
  }

  /** One path for each phase over all lanes of a way; a step with both has two halves. */
  lanePaths(a, result, top, lane, marker) {
    const paths = { prefill: [], decode: [] };
    const texts = [];
    const place = (i) => top + i * (lane + LANES.gap);
    const box = (x0, x1, y, height) => `M${x0.toFixed(1)} ${y.toFixed(1)}H${x1.toFixed(1)}v${height.toFixed(1)}H${x0.toFixed(1)}z`;
    result.lanes.forEach((each, i) => {
      const y = place(i);
      for (const [mix, start, stop] of each.bars) {
        if (start > a.end) continue;
        const x0 = a.x(start);
        const x1 = Math.max(a.x(stop), x0 + 0.7);
        if (mix !== DECODE) paths.prefill.push(box(x0, x1, y, mix === MIXED ? lane / 2 : lane));
        if (mix !== PREFILL) paths.decode.push(box(x0, x1, mix === MIXED ? y + lane / 2 : y, mix === MIXED ? lane / 2 : lane));
      }
      if (lane >= 11) texts.push(`<text x="${a.left - 6}" y="${y + lane / 2 + 5}" text-anchor="end">${each.name}</text>`);
      if (lane >= 11) texts.push(`<text x="${a.right + 6}" y="${y + lane / 2 + 5}">${Math.round(100 * each.busy)} %</text>`);
    });
    const back = result.lanes.map((_, i) => box(a.left, a.right, place(i), lane)).join("");
    const arrows = result.arrows.filter(([, , sent]) => sent < a.end).map(([from, to, sent, ready]) => `M${a.x(sent).toFixed(1)} ${(place(from) + (to > from ? lane : 0)).toFixed(1)}L${a.x(ready).toFixed(1)} ${(place(to) + (to > from ? 0 : lane)).toFixed(1)}`);
    const filled = (kind) => `<path data-kind="${kind}" fill="var(--pd-${kind})" d="${paths[kind].join("")}"/>`;
    const drawn = arrows.map((d) => `<path class="pd-dl-arrow" marker-end="url(#${marker})" d="${d}"/>`).join("");
    return `<path class="pd-dl-lane" d="${back}"/>${filled("prefill")}${filled("decode")}${drawn ? `<path class="pd-dl-halo" d="${arrows.join("")}"/>` : ""}${drawn}${texts.join("")}`;
  }

  // ---- latencies --------------------------------------------------------------------------

  /** A row each way: from p50 to p99 on a logarithmic axis, with the limit across if there is one. */
  drawRange(key, label, limit) {
    const node = this.ranges[key];
    const width = node.clientWidth || 280;
    const rows = this.plotted.filter(({ result }) => result.numbers[key]);
    const values = [...rows.flatMap(({ result }) => result.numbers[key]), limit].filter((v) => v > 0);
    if (!values.length) return clear(node);
    const [low, high] = [niceLog(Math.min(...values), Math.floor), niceLog(Math.max(...values), Math.ceil)];
    const a = { left: RANGE.left, right: width - RANGE.right, top: RANGE.top, bottom: RANGE.top + RANGE.row * rows.length };
    a.x = (s) => a.left + (Math.log(Math.max(s, low) / low) / Math.log(high / low)) * (a.right - a.left);
    const ticks = logTicks(low, high, (a.right - a.left) / 52).map((v) => `<path class="pd-pl-grid" d="M${a.x(v)} ${a.top}V${a.bottom + 4}"/><text x="${a.x(v) < 24 ? 0 : a.x(v)}" y="${a.bottom + 18}" text-anchor="${a.x(v) < 24 ? "start" : "middle"}">${duration(v)}</text>`);
    const marks = rows.map((row, place) => this.rangeMarks(a, row, key, label, a.top + (place + 0.5) * RANGE.row));
    const words = limit ? `, limit ${duration(limit)}` : "";
    node.innerHTML = `<svg width="${width}" height="${a.bottom + RANGE.bottom}" role="img" aria-label="${label} of each way${words}">${ticks.join("")}${limit ? this.limitMark(a, limit) : ""}<text class="pd-strong" x="0" y="${a.top - 6}">${label}</text>${marks.join("")}</svg>`;
  }

  limitMark(a, limit) {
    const x = a.x(limit);
    const anchor = x > a.right - 40 ? "end" : x < a.left + 90 ? "start" : "middle";
    return `<rect class="pd-dl-late" x="${x}" y="${a.top}" width="${Math.max(0, a.right - x)}" height="${a.bottom - a.top}"/><path class="pd-pl-limit" d="M${x} ${a.top - 3}V${a.bottom}"/><text class="pd-strong" x="${anchor === "end" ? a.right + RANGE.right : Math.max(x, 46)}" y="${a.top - 6}" text-anchor="${anchor}">limit ${duration(limit)}</text>`;
  }

  rangeMarks(a, { i, result, hollow }, key, label, y) {
    const told = result.numbers[key];
    const [p50, p90, p99] = told.map(a.x);
    const title = `${result.name}: ${label} ${["p50", "p90", "p99"].map((name, n) => `${name} ${duration(told[n])}`).join(", ")}`;
    return `<g data-way="${i}"><title>${title}</title><rect x="${a.left}" y="${y - RANGE.row / 2}" width="${a.right - a.left}" height="${RANGE.row}" fill="transparent"/>
      <path d="M${p50} ${y}H${p99}" stroke="var(--pd-run-${i})" stroke-width="2.5" ${hollow ? 'stroke-dasharray="5 3"' : ""}/><circle cx="${p50}" cy="${y}" r="4.5" ${paint(i, hollow)}/><path d="M${p90} ${y - 6}l5 6l-5 6l-5 -6z" ${paint(i, hollow)}/><rect x="${p99 - 2}" y="${y - 7}" width="4" height="14" ${paint(i, hollow)}/></g>`;
  }

  // ---- waits ------------------------------------------------------------------------------

  drawWaits() {
    const stages = this.get("header").stages;
    const total = (result) => stages.reduce((sum, [key]) => sum + result.stages[key], 0);
    const most = Math.max(...this.plotted.map(({ result }) => total(result)), 1e-9);
    const part = (result, [key, label, color]) => h("div", { "data-stage": color, style: `width:${(100 * result.stages[key]) / most}%`, title: `${label}: ${duration(result.stages[key])}` });
    clear(this.waits, ...this.plotted.map(({ result, i, hollow }) => h("div", {}, [
      h("div.pd-dl-of", {}, [h("i.pd-swatch", { style: hollow ? `border:2px solid var(--pd-run-${i})` : `background:var(--pd-run-${i})` }), result.name, h("span.pd-num", {}, [duration(total(result))])]),
      h("div.pd-dl-stack", { role: "img", "aria-label": stages.map(([key, label]) => `${label} ${duration(result.stages[key])}`).join(", ") }, stages.map((s) => part(result, s)))])));
    clear(this.waitsKey, ...stages.filter(([key]) => this.plotted.some(({ result }) => result.stages[key] > 0)).map(([, label, color]) => h("span", {}, [h("i.pd-swatch", { "data-stage": color }), label])));
    const told = this.real ? this.real.pictures[0] : this.get("results")[this.get("chosen")];
    clear(this.words, h("b", {}, [`${told?.name}: `]), told?.words ?? "");
  }

  // ---- for real ---------------------------------------------------------------------------

  drawReal() {
    const real = this.get("real");
    const { num_real: num, here, num_cores: cores } = this.get("header");
    const result = this.get("results")[this.get("chosen")];
    const running = real.state === "running";
    const possible = here.includes(this.get("machine")) && this.get("num_devices") <= cores;
    this.runButton.disabled = running || !possible;
    this.runButton.textContent = `Run ${result?.name ?? "it"} for real`;
    this.runButton.title = possible ? `The first ${num} requests, in real time, with a process for each worker, beside the simulation of exactly these requests` : "Needs a model, this machine, and a core for each worker";
    this.stopButton.hidden = this.bar.hidden = !running;
    this.bar.max = real.num ?? 1;
    if (real.stage === "serving") this.bar.value = real.finished;
    else this.bar.removeAttribute("value"); // on its way, nobody knows how far
    clear(this.realText, ...this.realWords(real, possible, result));
    const reals = this.get("reals");
    this.table.hidden = !reals.length;
    if (reals.length) this.drawTable(reals);
    this.root.dataset.real = real.state;
    this.root.dataset.stage = real.stage ?? "";
  }

  realWords(real, possible, result) {
    if (real.stage === "stopping") return ["Stopping: its processes are ended …"];
    if (real.state === "running" && real.stage !== "serving") return [`${real.name}: ${real.workers} processes are ${real.stage || "starting"} …`];
    if (real.state === "running") return [`${real.name}: ${real.finished} of ${real.num} finished, ${digits(real.now_s)} s of about ${digits(real.takes_s)} s`];
    if (real.state === "stopped") return [`Stopped after ${real.finished} of ${real.num} requests: no numbers, and no process is left.`];
    if (real.state === "failed") return [h("b", {}, [`It failed: ${real.error}`])];
    const { here, num_cores: cores, num_real: num } = this.get("header");
    if (!here.length) return ["needs a model: PDLab(model)"];
    if (!here.includes(this.get("machine"))) return ["choose this machine for it"];
    if (!possible) return [`${this.get("num_devices")} workers need as many cores; here are ${cores}`];
    return [`first ${num} requests: some seconds to start, then about ${digits(result?.real_s ?? 0)} s`];
  }

  drawTable(reals) {
    const last = reals.at(-1);
    const slower = Object.entries(last.slower).map(([role, ratio]) => `${digits(ratio)} ×${{ prefill: " (prompts)", decode: " (outputs)" }[role] ?? ""}`).join(", ");
    const now = reals.some((each) => each.line === this.get("results")[each.mode]?.line) ? "" : " These are other settings than those above.";
    clear(this.table, comparison(reals),
      h("div.pd-hint", {}, [`First ${this.get("real").num ?? this.get("header").num_real} requests of ${last.line}. ${capital(last.measured)}; ${last.simulated}. Real steps took ${slower} the simulated time.${besideText(last.beside)}${now}`]));
  }
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** Measured is filled, its simulation only outlined. */
function paint(i, hollow) {
  return hollow ? `fill="var(--jp-layout-color0, var(--pd-surface))" stroke="var(--pd-run-${i})" stroke-width="2"` : `fill="var(--pd-run-${i})"`;
}

const TRANSFER_NAMES = { stream: "layer by layer", push: "push", pull: "pull" };

export default { render };
