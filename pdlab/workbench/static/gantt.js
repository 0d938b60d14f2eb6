// The Gantt chart: a row for each request, the engine's steps below, one time axis. Data: gantt_data.py.

const [WAITING, PREFILL, DECODE, STALLED, PREEMPTED] = [0, 1, 2, 3, 4];
const KIND_NAMES = ["waits", "prefill", "decode", "stalled: others run", "preempted"];
const MIX_NAMES = ["prefill", "decode", "mixed"];
const MIX_COLORS = ["prefill", "decode", "transfer"];
const BOX = { left: 92, right: 26, top: 8, gap: 40, strip: 104, bottom: 34 };
const ENDS = { stop: "finished", length: "finished", abort: "aborted", error: "refused", refused: "refused", running: "still running" };
const LEAST_TICK = 5; // pixels between two tokens from which on they are drawn apart

function render({ model, el }) {
  const view = new Gantt(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class Gantt {
  constructor(model) {
    Object.assign(this, { model, hatch: uniqueId("hatch"), clip: uniqueId("clip"), drag: null });
    this.build();
    this.stop = listen(model, {
      "change:runs": () => this.reload(), "change:run": () => this.show(),
      "change:view": () => this.draw(), "change:selected": () => this.draw(),
    });
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
    this.tabs = h("div.pd-gt-tabs", { role: "group", "aria-label": "Run" });
    this.facts = h("div.pd-gt-facts.pd-num");
    this.legend = h("div.pd-legend");
    const button = (text, label, action) => h("button", { type: "button", title: label, "aria-label": label, onclick: action }, [text]);
    this.zooms = h("div.pd-gt-zoom", { role: "group", "aria-label": "Time shown" }, [
      button("−", "Zoom out (−)", () => this.zoom(2)), button("+", "Zoom in (+)", () => this.zoom(0.5)),
      button("◂", "Earlier (←)", () => this.pan(-0.25)), button("▸", "Later (→)", () => this.pan(0.25)), button("all", "Show all (0)", () => this.look([]))]);
    this.pages = h("div.pd-gt-zoom", { role: "group", "aria-label": "Requests shown" }, [
      button("▴", "Earlier requests", () => this.page(-1)), (this.pageText = h("span.pd-num")), button("▾", "Later requests", () => this.page(1))]);
    this.plot = h("div.pd-gt-plot", {
      tabindex: 0, "data-lm-suppress-shortcuts": "true", role: "application", "aria-label": "Gantt chart: arrow keys move, plus and minus zoom, 0 shows all, up and down choose a request",
      onkeydown: (e) => this.onKey(e), onpointerdown: (e) => this.press(e), onpointermove: (e) => this.hover(e),
      onpointerup: (e) => this.release(e), onpointerleave: () => this.leave(), onpointercancel: () => this.leave() });
    this.plot.addEventListener("wheel", (e) => this.onWheel(e), { passive: false });
    this.inspect = h("div.pd-gt-inspect.pd-num", { "aria-live": "polite" });
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-gantt", { role: "group", "aria-label": "Gantt" }, [
      h("div.pd-head", {}, [this.title, this.tabs]), this.facts,
      h("div.pd-gt-bar", {}, [this.legend, this.pages, this.zooms]), this.plot, this.inspect, this.foot]);
    this.tip = tooltip(this.root);
  }

  push(values) {
    for (const [key, value] of Object.entries(values)) this.model.set(key, value);
    this.model.save_changes();
  }

  // ---- what is shown ----------------------------------------------------------------------

  reload() {
    this.runs = this.model.get("runs");
    const most = (key) => Math.max(...this.runs.map((r) => r[key]));
    this.extent = [Math.min(...this.runs.map((r) => (r.rows.length ? r.start_s : Infinity)), most("end_s")), Math.max(most("end_s"), 1e-6)];
    this.count = Math.max(1, ...this.runs.map((r) => r.rows.length));
    const choose = (run) => h("button", { type: "button", "data-run": run.name, onclick: () => this.shift(run.name) }, [run.name]);
    clear(this.tabs, ...(this.runs.length > 1 ? this.runs.map(choose) : []));
    this.root.toggleAttribute("data-empty", this.runs.every((r) => !r.rows.length));
    this.show();
  }

  shift(name) {
    this.push({ run: name });
    this.show();
  }

  show() {
    this.run = this.runs.find((r) => r.name === this.model.get("run")) ?? this.runs[0];
    for (const tab of this.tabs.children) tab.setAttribute("aria-pressed", String(tab.dataset.run === this.run.name));
    this.pages.hidden = this.runs.every((r) => r.num_requests <= r.rows.length);
    const { rows, first, num_requests: all } = this.run;
    this.pageText.textContent = `${rows.length ? first + 1 : 0}–${first + rows.length} of ${all}`;
    this.drawHead();
    this.drawLegend();
    this.drawFoot();
    this.draw();
  }

  drawHead() {
    const { facts: f, num_requests: all, duration_s: time, name } = this.run;
    this.title.textContent = !all ? "No request was served" : `${this.runs.length > 1 ? `${name}: ` : ""}${f.finished} of ${all} requests finished in ${duration(time)}`;
    const fact = (label, value) => h("span", {}, [label, " ", h("b", {}, [value])]);
    clear(this.facts, fact("TTFT p50", duration(f.ttft_p50)), fact("p99", duration(f.ttft_p99)), fact("TPOT p50", duration(f.tpot_p50)), fact("p99", duration(f.tpot_p99)),
      f.preemptions ? fact("preemptions", f.preemptions) : null, f.met == null ? null : fact("within limits", `${f.met} of ${all}`), f.refused ? fact("refused", f.refused) : null);
  }

  drawLegend() {
    const kinds = new Set(this.runs.flatMap((r) => r.rows.flatMap((row) => row.spans.map((s) => s[0]))));
    const slo = this.model.get("slo");
    const entry = (inner, text) => {
      const item = h("span", {}, [h("i.pd-gt-key"), text]);
      item.firstChild.innerHTML = `<svg viewBox="0 0 26 14">${inner}</svg>`;
      return item;
    };
    const bar = (color) => `<rect y="1" width="26" height="12" fill="var(--pd-${color})"/>`;
    clear(this.legend,
      kinds.has(WAITING) ? entry('<rect y="5" width="26" height="4" fill="var(--pd-waiting)"/>', "waits") : null,
      kinds.has(PREFILL) ? entry(bar("prefill"), "prefill, tokens") : null, !kinds.has(DECODE) ? null : entry(`${bar("decode")}<path class="pd-gt-tick" d="M7 1v12M13 1v12M19 1v12"/>`, "decode"),
      kinds.has(STALLED) ? entry('<path class="pd-gt-stall" d="M0 7H26"/>', "stalled") : null,
      kinds.has(PREEMPTED) ? entry(`<defs>${hatch(this.hatch)}</defs><rect class="pd-gt-lost" x="1" y="2" width="24" height="10" fill="url(#${this.hatch})"/>`, "preempted") : null,
      this.runs.every((r) => r.steps.every((s) => s.mix < 2)) ? null : entry(`<rect y="1" width="26" height="8" fill="var(--pd-transfer)"/><rect y="9" width="26" height="4" fill="var(--pd-decode)"/>`, "mixed step"),
      !kinds.size ? null : entry('<circle class="pd-gt-done" cx="13" cy="7" r="5"/>', slo ? "within limits" : "finished"),
      this.runs.some((r) => r.rows.some((row) => ["aborted", "refused"].includes(ENDS[row.end]))) ? entry('<rect class="pd-gt-ended" x="8" y="2" width="10" height="10"/>', "aborted, refused") : null,
      slo && kinds.size ? entry('<path class="pd-gt-missed" d="M8 2l10 10M18 2l-10 10"/>', `TTFT > ${duration(slo.ttft_s)} or TPOT > ${duration(slo.tpot_s)}`) : null);
  }

  drawFoot() {
    const { provenance, line, joined_s: joined, rows, num_requests: all, first } = this.run;
    const cut = rows.length < all ? `${first ? `requests ${first + 1} to ${first + rows.length}` : `first ${rows.length}`} of ${all} requests` : "";
    clear(this.foot, provenanceTag(provenance), h("span", {}, [line.replace(/^\w+:? /, "")]), cut ? h("b", {}, [cut]) : null,
      joined ? h("span", {}, [`spans below ${duration(joined)} are drawn with their neighbours`]) : null, h("span", {}, ["keys: ← → + − 0 ↑ ↓; wheel: Ctrl zooms, Shift moves"]));
  }

  // ---- geometry ---------------------------------------------------------------------------

  get range() {
    const view = this.model.get("view");
    return view.length === 2 ? view : this.extent;
  }

  /** The top of the panel of steps: of the run shown, so that small budgets can be read, too. */
  get mostTokens() {
    return Math.max(1, this.run.most_tokens);
  }

  axes() {
    const width = (this.width = this.plot.clientWidth || this.width || 860); // 0 while detached
    const height = Math.max(6, Math.min(28, Math.floor(460 / this.count)));
    const [from, to] = this.range;
    const right = width - BOX.right;
    const x = (s) => BOX.left + ((s - from) / (to - from)) * (right - BOX.left);
    const stripTop = BOX.top + this.count * height + BOX.gap;
    return { width, height, from, to, right, x, stripTop, bottom: stripTop + BOX.strip, y: (i) => BOX.top + i * height };
  }

  secondsAt(event) {
    const { from, to, right } = this.a;
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    return from + ((x - BOX.left) / (right - BOX.left)) * (to - from);
  }

  // ---- moving -----------------------------------------------------------------------------

  look(view) {
    if (view.length) {
      const [low, high] = this.extent;
      const length = Math.min(high - low, Math.max(view[1] - view[0], (high - low) * 1e-4));
      const from = Math.max(low, Math.min(view[0], high - length));
      view = length >= (high - low) * 0.9999 ? [] : [from, from + length];
    }
    this.model.set("view", view);
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.model.save_changes(), 150);
    this.draw();
  }

  zoom(factor, about = (this.range[0] + this.range[1]) / 2) {
    const [from, to] = this.range;
    this.look([about - (about - from) * factor, about + (to - about) * factor]);
  }

  pan(share) {
    const [from, to] = this.range;
    this.look([from + share * (to - from), to + share * (to - from)]);
  }

  page(direction) {
    if (this.pages.hidden) return;
    this.pageText.textContent = "…"; // Python sends the other rows
    this.push({ first: Math.max(0, Math.min(this.run.first + direction * this.count, this.run.num_requests - 1)) });
  }

  select(index) {
    const row = this.run.rows[Math.max(0, Math.min(index, this.run.rows.length - 1))];
    this.push({ selected: row?.id ?? "" });
    this.draw();
  }

  onKey(event) {
    const at = this.run.rows.findIndex((r) => r.id === this.model.get("selected"));
    const moves = { ArrowLeft: () => this.pan(-0.25), ArrowRight: () => this.pan(0.25), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.look([]), ArrowUp: () => this.select(at < 0 ? this.run.rows.length - 1 : at - 1), ArrowDown: () => this.select(at + 1), PageUp: () => this.page(-1), PageDown: () => this.page(1), Escape: () => (this.push({ selected: "" }), this.draw()) };
    if (event.ctrlKey || event.metaKey || event.altKey || !moves[event.key]) return;
    moves[event.key]();
    event.preventDefault();
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const turn = event.deltaY || event.deltaX;
    if (event.shiftKey) this.pan(Math.sign(turn) * 0.1);
    else this.zoom(1.0025 ** Math.max(-200, Math.min(200, turn)), this.secondsAt(event));
  }

  press(event) {
    if (event.button) return;
    this.drag = { x: event.clientX, view: this.range, moved: false };
    this.point(event);
  }

  hover(event) {
    const moved = this.drag ? event.clientX - this.drag.x : 0;
    if (!this.drag || (!this.drag.moved && Math.abs(moved) < 5)) return this.point(event);
    if (!this.drag.moved) this.plot.setPointerCapture(event.pointerId);
    this.drag.moved = true;
    this.tip.hide();
    const [from, to] = this.drag.view;
    const shift = (-moved / (this.a.right - BOX.left)) * (to - from);
    this.look([from + shift, to + shift]);
  }

  release(event) {
    if (this.drag && !this.drag.moved) {
      const row = this.rowAt(event);
      if (row) this.select(this.run.rows.indexOf(row));
    }
    this.drag = null;
  }

  leave() {
    this.drag = null;
    this.tip.hide();
    this.cross?.setAttribute("d", "");
  }

  // ---- pointing ---------------------------------------------------------------------------

  rowAt(event) {
    const y = event.clientY - this.plot.getBoundingClientRect().top;
    return this.run.rows[Math.floor((y - BOX.top) / this.a.height)];
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const inside = x >= BOX.left && x <= this.a.right;
    this.cross?.setAttribute("d", inside ? `M${x} ${BOX.top}V${this.a.bottom}` : "");
    const time = this.secondsAt(event);
    const row = this.rowAt(event);
    const step = y > this.a.stripTop - 12 && inside ? this.run.steps.find((s) => s.at[0] <= time && time <= s.at[1]) : null;
    if (row && y < this.a.stripTop - BOX.gap) this.tip.show(event, this.describeRow(row, time));
    else if (step) this.tip.show(event, this.describeStep(step));
    else this.tip.hide();
  }

  describeRow(row, time) {
    const span = row.spans.find((s) => s[1] <= time && time <= s[2]);
    const tokens = span?.[3] ? `, ${span[3]} ${span[3] === 1 ? "token" : "tokens"}` : "";
    const now = span ? `${KIND_NAMES[span[0]]}${tokens}, ${duration(span[2] - span[1])}` : null;
    return [`${row.id}: ${this.outcome(row)}`, ...(now ? [`here: ${now}`] : []), ...times(row)];
  }

  outcome(row) {
    const missed = row.met === false && ENDS[row.end] === "finished" ? ", limits missed" : "";
    return (ENDS[row.end] ?? row.end) + missed;
  }

  describeStep(s) {
    const count = s.steps ? `${s.steps} ${MIX_NAMES[s.mix]} steps, ${duration((s.at[1] - s.at[0]) / s.steps)} each` : `${MIX_NAMES[s.mix]} step, ${duration(s.at[1] - s.at[0])}`;
    const held = (s.held ?? []).map(([id, n]) => `${id}: ${n} prompt tokens`);
    const mean = s.parts ? ", mean of a step" : "";
    return [count, `${s.decodes} decodes + ${s.prompt} prompt tokens${mean}`, ...held, s.more ? `and ${s.more} prompts more` : null,
      s.preempted ? `preempted: ${s.preempted.join(", ")}` : null, `${s.running} hold KV (${s.blocks_before ? `${s.blocks_before} to ` : ""}${s.blocks} of ${this.run.num_blocks} blocks), ${s.waiting} wait`].filter(Boolean);
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    const a = (this.a = this.axes());
    const { rows } = this.run;
    const inner = `<clipPath id="${this.clip}"><rect x="${BOX.left - 1}" y="0" width="${a.right - BOX.left + BOX.right}" height="${a.bottom + 1}"/></clipPath>`;
    this.plot.innerHTML = `<svg width="${a.width}" height="${a.bottom + BOX.bottom}" role="img" aria-label="${escapeText(this.title.textContent)}"><defs>${inner}${hatch(this.hatch)}</defs>
      ${this.selection(a)}${this.extent[1] > 1e-6 ? this.timeAxis(a) : ""}<g clip-path="url(#${this.clip})">${this.rows(a)}${this.strip(a)}</g>${this.names(a)}${this.run.steps.length ? this.stripAxis(a) : ""}<path class="pd-gt-cross" d=""/></svg>`;
    this.cross = this.plot.querySelector(".pd-gt-cross");
    this.drawInspect();
    const [, out, , earlier, later] = [null, ...this.zooms.children];
    const all = this.model.get("view").length !== 2;
    for (const node of [out, earlier, later, this.zooms.lastChild]) node.disabled = all;
    this.root.dataset.shown = `${this.run.name}/${this.run.first}/${a.from.toFixed(4)}-${a.to.toFixed(4)}`;
  }

  selection(a) {
    const at = this.run.rows.findIndex((r) => r.id === this.model.get("selected"));
    return at < 0 ? "" : `<rect class="pd-gt-selected" x="0" y="${a.y(at)}" width="${a.width}" height="${a.height}" rx="3"/>`;
  }

  /** One path for each kind of span over all rows, so that thousands of spans stay cheap. */
  rows(a) {
    const paths = KIND_NAMES.map(() => []);
    const [ticks, arrivals, texts, marks] = [[], [], [], []];
    const pad = a.height > 14 ? 3 : a.height > 8 ? 1.5 : 0.75;
    const largest = Math.min(14, a.height - 2 * pad - 4);
    this.run.rows.forEach((row, i) => {
      const [top, middle] = [a.y(i), a.y(i) + a.height / 2];
      const bar = (x0, x1, half) => `M${x0.toFixed(1)} ${(middle - half).toFixed(1)}H${x1.toFixed(1)}V${(middle + half).toFixed(1)}H${x0.toFixed(1)}z`;
      const half = { [WAITING]: Math.max(1, a.height * 0.1), [PREEMPTED]: (a.height - 2 * pad) * 0.36 };
      const seen = row.spans.filter((s) => s[2] >= a.from && s[1] <= a.to);
      for (const [kind, start, end, tokens] of seen) {
        const x0 = Math.max(BOX.left - 4, a.x(start));
        const x1 = Math.min(a.width + 4, Math.max(a.x(end), x0 + (kind === PREFILL ? 1.5 : 0.7)));
        if (kind === STALLED) paths[kind].push(`M${x0.toFixed(1)} ${middle}H${x1.toFixed(1)}`);
        else paths[kind].push(bar(x0, x1, half[kind] ?? a.height / 2 - pad));
        const size = kind === PREFILL && tokens ? Math.min(largest, (x1 - x0 - 4) / (0.6 * String(tokens).length)) : 0;
        if (size >= 10) texts.push(`<text class="pd-gt-count" style="font-size:${size}px" x="${(x0 + x1) / 2}" y="${middle + size * 0.36}">${tokens}</text>`);
        if (kind === PREFILL && x1 - x0 > 4) ticks.push(`M${x1.toFixed(1)} ${top + pad}v${a.height - 2 * pad}`);
        if (kind === DECODE && (a.x(end) - a.x(start)) / tokens >= LEAST_TICK) ticks.push(...this.tokenTicks(a, start, end, top + pad, a.height - 2 * pad));
      }
      arrivals.push(`M${a.x(row.arrival_s).toFixed(1)} ${top + pad}v${a.height - 2 * pad}`);
      marks.push(endMark(row, a.x(row.spans.at(-1)?.[2] ?? row.arrival_s), middle, Math.max(2, Math.min(5.5, a.height * 0.28))));
    });
    const path = (kind, fill, name = "") => (paths[kind].length ? `<path data-kind="${kind}" class="${name}" fill="${fill}" d="${paths[kind].join("")}"/>` : "");
    return `<path class="pd-gt-arrival" d="${arrivals.join("")}"/>${path(WAITING, "var(--pd-waiting)")}${path(STALLED, "none", "pd-gt-stall")}${path(PREEMPTED, `url(#${this.hatch})`, "pd-gt-lost")}
      ${path(PREFILL, "var(--pd-prefill)")}${path(DECODE, "var(--pd-decode)")}<path class="pd-gt-tick" d="${ticks.join("")}"/>${texts.join("")}${marks.join("")}`;
  }

  /** Where the tokens of a row of decodes end: at the ends of the steps within it. */
  tokenTicks(a, start, end, top, height) {
    const ticks = [];
    for (const s of this.run.steps) {
      if (s.at[1] > end - 1e-6 && s.at[0] >= end - 1e-6) break;
      if (s.at[1] <= start || s.parts) continue;
      const count = s.steps ?? 1;
      for (let i = 1; i <= count; i++) {
        const x = a.x(s.at[0] + ((s.at[1] - s.at[0]) * i) / count);
        if (x > BOX.left - 2 && x < a.width && x < a.x(end) - 1) ticks.push(`M${x.toFixed(1)} ${top}v${height}`);
      }
    }
    return ticks;
  }

  names(a) {
    const every = Math.max(1, Math.ceil(15 / a.height));
    const label = (row, i) => (i % every ? "" : `<text class="pd-gt-name" x="${BOX.left - 10}" y="${a.y(i) + a.height / 2 + 4.5}">${escapeText(shorten(row.id))}</text>`);
    return this.run.rows.map(label).join("");
  }

  strip(a) {
    const y = (tokens) => a.bottom - (tokens / this.mostTokens) * BOX.strip;
    const paths = ["", "", ""];
    let decodes = "";
    for (const s of this.run.steps) {
      if (s.at[1] < a.from || s.at[0] > a.to || !(s.prompt + s.decodes)) continue;
      const [x0, x1] = [Math.max(BOX.left - 4, a.x(s.at[0])), Math.min(a.width + 4, a.x(s.at[1]))];
      const shape = (low, high) => `M${x0.toFixed(1)} ${low.toFixed(1)}V${high.toFixed(1)}H${Math.max(x1 - (x1 - x0 > 3 ? 1 : 0), x0 + 0.7).toFixed(1)}V${low.toFixed(1)}z`;
      const top = Math.min(y(s.prompt + s.decodes), a.bottom - 2);
      const low = s.mix === 2 ? Math.min(y(s.decodes), a.bottom - 4) : a.bottom;
      if (s.mix === 2) decodes += shape(a.bottom, low);
      paths[s.mix] += shape(low, Math.min(top, low - 1));
    }
    return paths.map((d, mix) => (d ? `<path data-mix="${mix}" fill="var(--pd-${MIX_COLORS[mix]})" d="${d}"/>` : "")).join("") + (decodes ? `<path fill="var(--pd-decode)" d="${decodes}"/>` : "");
  }

  stripAxis(a) {
    const most = this.mostTokens;
    const y = (tokens) => a.bottom - (tokens / most) * BOX.strip;
    const marks = [0, ...niceTicks(most, 2)].map((v) => `<text x="${BOX.left - 10}" y="${y(v) + 4.5}" text-anchor="end">${quantity(v)}</text>`);
    const budget = this.run.budget;
    const line = budget && budget <= most * 1.15 ? `<path class="pd-gt-budget" d="M${BOX.left} ${y(budget)}H${a.right}"/>` : "";
    const far = budget && !line ? ` (budget ${budget.toLocaleString("en")}: far above)` : budget ? ` (dashed: budget ${budget.toLocaleString("en")})` : "";
    return `<text class="pd-strong" x="${BOX.left}" y="${a.stripTop - 16}">tokens in each step${far}</text>${marks.join("")}${line}`;
  }

  timeAxis(a) {
    const step = niceTime((a.to - a.from) / Math.max(2, Math.floor((a.right - BOX.left) / 84)));
    const unit = a.to - a.from + step < 1 ? [1e3, "ms"] : [1, "s"];
    const places = Math.max(0, -Math.floor(Math.log10(step * unit[0]) + 1e-9));
    const values = Array.from({ length: Math.floor(a.to / step + 1e-9) - Math.ceil(a.from / step - 1e-9) + 1 }, (_, i) => (Math.ceil(a.from / step - 1e-9) + i) * step);
    const label = (v, i) => `${(v * unit[0]).toFixed(places)}${i === values.length - 1 ? ` ${unit[1]}` : ""}`;
    return values.map((v, i) => `<path class="pd-gt-grid" d="M${a.x(v)} ${BOX.top}V${a.stripTop - BOX.gap + 6}M${a.x(v)} ${a.stripTop}V${a.bottom + 5}"/><text x="${a.x(v)}" y="${a.bottom + 22}" text-anchor="middle">${label(v, i)}</text>`).join("") +
      `<path class="pd-gt-base" d="M${BOX.left} ${a.bottom}H${a.right}"/>`;
  }

  drawInspect() {
    const row = this.run.rows.find((r) => r.id === this.model.get("selected"));
    if (!row) return clear(this.inspect, h("span.pd-muted", {}, ["Point at a row or a step; click a row, or press ↓, to keep its times here."]));
    const priority = row.priority ? [` priority ${row.priority}`] : [];
    clear(this.inspect, h("b", {}, [`${row.id}: ${this.outcome(row)}`]), ...[...times(row), ...priority].map((text) => h("span", {}, [text])));
  }
}

/** What became of a request, beside its last span. */
function endMark(row, x, y, r) {
  const at = x + r + 3;
  if (row.end === "running") return "";
  if (ENDS[row.end] !== "finished") return `<rect class="pd-gt-ended" x="${at - r}" y="${y - r}" width="${2 * r}" height="${2 * r}"/>`;
  if (row.met === false) return `<path class="pd-gt-missed" style="stroke-width:${Math.max(1.2, r * 0.45)}px" d="M${at - r} ${y - r}l${2 * r} ${2 * r}M${at + r} ${y - r}l${-2 * r} ${2 * r}"/>`;
  return `<circle class="pd-gt-done" cx="${at}" cy="${y}" r="${r}"/>`;
}

function times(row) {
  const cached = row.cached ? ` (${row.cached} cached)` : "";
  return [row.error || null, `queue ${duration(row.queue_s)}, TTFT ${duration(row.ttft_s)}`, `TPOT ${duration(row.tpot_s)}, E2E ${duration(row.e2e_s)}`,
    `${row.prompt} tokens in${cached}, ${row.output} out`, row.preemptions ? `preempted ${row.preemptions}×` : null].filter(Boolean);
}

const hatch = (id) => `<pattern id="${id}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2.6" height="6" fill="var(--pd-preempted)"/></pattern>`;
const shorten = (text) => (text.length > 10 ? `${text.slice(0, 9)}…` : text);
const escapeText = (t) => t.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

/** 1, 2 or 5 times a power of ten, at least so long. */
function niceTime(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((t) => t >= least * 0.9999);
}

/** About `count` round numbers above 0 and up to `most`. */
function niceTicks(most, count) {
  const step = Math.max(1, niceTime(most / (count + 0.5)));
  return Array.from({ length: Math.floor(most / step) }, (_, i) => (i + 1) * step);
}

export default { render };
