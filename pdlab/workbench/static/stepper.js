// The Stepper: one sequence's walk through the engine, a frame at a time. Frames come from frames.py.

const PHASES = { tokenize: "tokenize", prefill: "prefill", decode: "decode", waiting: "waiting", preempted: "preempted", fork: "fork", swapped: "swapped" };
const KIND_COLORS = { fork: "cached", swapped: "transfer" };
const MAX_CHIPS = 600;
const MAX_CELLS = 1024;
const DROPPED = -1;

function render({ model, el }) {
  const view = new StepperView(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class StepperView {
  constructor(model) {
    this.model = model;
    this.build();
    this.stop = listen(model, {
      "change:frames": () => this.reload(),
      "change:step": () => this.model.get("step") !== this.index && this.show(this.model.get("step")),
      "change:busy": () => this.drawLive(),
      "change:message": () => this.drawLive(),
      "change:done": () => this.drawLive(),
    });
    this.stopAppearance = onAppearance(this.root, () => this.scrollToNewest());
  }

  destroy() {
    this.transport.pause();
    this.stop();
    this.stopAppearance();
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.pill = h("span.pd-pill");
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.note = h("div.pd-note");
    this.select = this.sequenceSelect();
    this.transport = new Transport({
      go: (index) => this.go(index),
      advance: () => this.runStep(),
      canAdvance: () => this.model.get("live") && !this.model.get("done"),
      isBusy: () => this.model.get("busy"),
    });
    this.live = h("div.pd-live", { role: "status" });
    this.transport.node.append(this.live);
    this.root = h("div.pdlab.pd-stepper", { role: "group", "aria-label": "Stepper", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.pill, this.title, this.select]),
      this.note,
      this.transport.node,
      this.timeSection(),
      h("div.pd-cols", {}, [h("div.pd-main", {}, this.mainColumn()), h("div.pd-side", {}, this.sideColumn())]),
      this.stepSection(),
      (this.foot = h("div.pd-foot")),
    ]);
  }

  sequenceSelect() {
    const sequences = this.model.get("header").sequences;
    if (sequences.length < 2) return null;
    const options = sequences.map((s) => h("option", { value: s.id }, [`sequence ${s.id}`]));
    const choose = () => (this.transport.pause(), this.push({ sequence_id: select.value, step: 0 }));
    const select = h("select", { "aria-label": "Sequence", onchange: choose }, options);
    return select;
  }

  mainColumn() {
    const [tokens, tokensBody] = section("Tokens", "hover for the id and the position");
    this.chips = h("div.pd-chips");
    tokensBody.append(this.chips, this.chipLegend());
    const [text, textBody] = section("Text so far");
    this.text = h("div.pd-text");
    textBody.append(this.text);
    const [next, nextBody] = section("Next token", "most probable candidates, before sampling");
    this.cands = h("div.pd-cands");
    nextBody.append(this.cands);
    return [tokens, text, next];
  }

  chipLegend() {
    const entry = (color, label) => h("span", {}, [h("i.pd-swatch", { style: `background:var(--pd-${color})` }), label]);
    const dashed = h("i.pd-swatch", { style: "border:1.5px dashed var(--pd-decode)" });
    return h("div.pd-legend.pd-chip-legend", {}, [
      entry("prefill", "prefill"), entry("decode", "decode"), entry("cached", "prefix cache or fork: computed for others"),
      h("span", {}, [dashed, "drawn, not computed yet"]), h("span", {}, ["solid: in this step"]),
    ]);
  }

  sideColumn() {
    const [table, tableBody] = section("Block table", "logical block → physical block, one cell a slot");
    this.table = h("div.pd-table");
    tableBody.append(this.table);
    const [pool, poolBody] = section("KV pool", "every physical block, coloured by its owner", "pd-pool");
    this.pool = h("div", { role: "img" });
    this.poolLegend = h("div.pd-legend", { style: "margin-top:6px" });
    poolBody.append(this.pool, this.poolLegend);
    return [table, pool];
  }

  timeSection() {
    const [node, body] = section("Time of this step", "all sequences of the batch together", "pd-time");
    this.stages = h("div.pd-stages", { role: "img" });
    this.stageLegend = h("div.pd-legend");
    body.append(this.stages, this.stageLegend);
    return node;
  }

  stepSection() {
    const [node, body] = section("Work and memory of this step", "all sequences of the batch together", "pd-step");
    this.metrics = h("div.pd-metrics");
    body.append(this.metrics);
    return node;
  }

  // ---- moving -----------------------------------------------------------------------------

  /** Take the frames anew: another sequence, or a step more of a live run. */
  reload() {
    this.frames = this.model.get("frames");
    this.tokens = this.model.get("tokens");
    this.colors = Object.fromEntries(this.model.get("header").sequences.map((s, i) => [s.id, i % 8]));
    this.sequenceId = this.model.get("sequence_id");
    if (this.select) this.select.value = this.sequenceId;
    this.drawStrip();
    this.drawFoot();
    this.drawLive();
    this.show(this.model.get("step"));
  }

  go(index) {
    this.show(index);
    if (this.model.get("step") !== this.index) this.push({ step: this.index });
  }

  push(values) {
    for (const [key, value] of Object.entries(values)) this.model.set(key, value);
    this.model.save_changes();
  }

  /** At the end of a live run, forward is one real step of the engine. */
  runStep() {
    this.model.set("busy", true); // shown at once; Python takes it back when the step is done
    this.drawLive();
    this.model.send({ type: "advance" });
  }

  // ---- drawing ----------------------------------------------------------------------------

  show(index) {
    this.index = this.transport.clip(index);
    const frame = this.frames[this.index];
    this.drawHead(frame);
    this.drawChips(frame);
    this.drawText(frame);
    this.drawCandidates(frame);
    this.drawTable(frame);
    this.drawPool(frame);
    this.drawStep(frame);
    this.scrollToNewest();
    this.root.dataset.frame = this.index;
  }

  drawHead(frame) {
    const color = kindColor(frame.kind);
    const style = frame.kind === "tokenize" ? "" : `background:var(--pd-${color});color:var(--pd-on-${color})`;
    this.pill.style.cssText = style;
    this.pill.textContent = PHASES[frame.kind];
    this.title.textContent = frame.title;
    this.note.textContent = frame.note;
    const where = frame.step == null ? "prompt" : `engine step ${frame.step}`;
    this.transport.show(this.index, `frame ${this.index} · ${where}`, frame.title);
  }

  drawStrip() {
    const tallest = Math.max(...this.frames.map((f) => f.wall_s ?? 0));
    const bars = this.frames.map((f) => ({
      height: tallest ? (f.wall_s ?? 0) / tallest : 0, color: f.kind === "tokenize" ? "muted" : kindColor(f.kind),
    }));
    this.transport.setBars(bars, tallest ? `bar: wall time of the step, the tallest ${duration(tallest)}` : "");
  }

  drawLive() {
    const busy = this.model.get("busy");
    const message = this.model.get("message");
    this.transport.node.classList.toggle("pd-busy", busy);
    this.root.setAttribute("aria-busy", String(busy));
    this.live.hidden = !this.model.get("live") && !message;
    this.live.toggleAttribute("data-error", Boolean(message));
    const state = this.model.get("done") ? "The sequence is finished." : "Live: forward runs one real engine step.";
    this.live.textContent = message || (busy ? "The engine is running a step …" : state);
    this.transport.drawButtons();
  }

  /** What each position is at this frame: the phase that computed it, or what it still waits for. */
  states(frame) {
    const states = new Array(frame.known).fill("todo");
    for (const f of this.frames.slice(0, this.index + 1)) {
      if (f.computed === 0) states.fill("todo");
      else if (f.cached) states.fill("cached", 0, f.cached);
      states.fill(f.kind, f.start, f.end);
    }
    states.fill(`now-${frame.kind}`, frame.start, frame.end);
    if (frame.sampled != null) states[frame.sampled] = "sampled";
    return states;
  }

  drawChips(frame) {
    const states = this.states(frame);
    const focus = frame.end || frame.known;
    const from = frame.known <= MAX_CHIPS ? 0 : Math.max(0, Math.min(focus - MAX_CHIPS / 2, frame.known - MAX_CHIPS));
    const to = Math.min(frame.known, from + MAX_CHIPS);
    const chips = [];
    if (from) chips.push(h("span.pd-chip-gap", {}, [`${from} earlier tokens …`]));
    for (let i = from; i < to; i++) {
      const [id, text] = this.tokens[i];
      chips.push(h("span.pd-chip", { "data-state": states[i], title: `id ${id}, position ${i}` }, tokenText(text)));
    }
    if (to < frame.known) chips.push(h("span.pd-chip-gap", {}, [`… ${frame.known - to} more tokens`]));
    clear(this.chips, ...chips);
  }

  /** Bring what is new into view; the boxes have no size, and cannot scroll, before they are in the page. */
  scrollToNewest() {
    const current = this.chips.querySelector('[data-state="sampled"]') ?? [...this.chips.querySelectorAll('[data-state^="now"]')].at(-1);
    const top = current ? current.offsetTop - this.chips.clientHeight + 40 : 0;
    this.chips.scrollTop = Math.max(0, top);
    this.text.scrollTop = this.text.scrollHeight;
    this.table.scrollTop = this.table.scrollHeight;
  }

  drawText(frame) {
    const before = this.frames[Math.max(0, this.index - 1)].text;
    const fresh = frame.text.slice(before.length);
    clear(this.text,
      h("span.pd-prompt", {}, [this.model.get("prompt")]),
      h("span", {}, [frame.text.slice(0, before.length)]),
      fresh && this.index ? h("span.pd-new", {}, [fresh]) : null);
  }

  drawCandidates(frame) {
    if (!frame.top.length) {
      const why = frame.sampled == null ? "No token is drawn in this step." : "This run kept no candidates.";
      clear(this.cands, h("div.pd-muted", { style: "grid-column:1/-1" }, [why]));
      return;
    }
    clear(this.cands, ...frame.top.flatMap((c) => [
      h("code" + (c.chosen ? ".pd-chosen" : ""), { title: `id ${c.id}` }, tokenText(c.text)),
      h("div.pd-bar", { "data-chosen": c.chosen, style: `width:${c.p * 100}%` }),
      h("span.pd-num" + (c.chosen ? ".pd-chosen" : ""), {}, [`${(c.p * 100).toFixed(1)} %`]),
    ]));
  }

  drawTable(frame) {
    const [blocks, computed] = frame.tables[this.sequenceId] ?? [[], 0];
    const size = this.model.get("header").block_size;
    if (!blocks.length) {
      clear(this.table, h("div.pd-muted", { style: "grid-column:1/-1" }, ["No block is taken."]));
      return;
    }
    clear(this.table, ...blocks.flatMap((block, logical) => [
      h("span", {}, [`${logical} → ${block === DROPPED ? "∅" : block}`]),
      h("span.pd-muted", {}, [block === DROPPED ? "" : `${Math.max(0, Math.min(size, computed - logical * size))}/${size}`]),
      block === DROPPED ? h("span.pd-muted", {}, ["given back: out of the window"])
        : h("span.pd-slots", {}, Array.from({ length: size }, (_, s) => this.slot(frame, logical * size + s, computed))),
    ]));
  }

  slot(frame, position, computed) {
    if (position >= computed) return h("i", { title: "taken, still empty" });
    const now = position >= frame.start && position < frame.end;
    const color = now ? frame.kind : position < frame.cached ? "cached" : `seq-${this.colors[this.sequenceId]}`;
    return h("i", { style: `background:var(--pd-${color})`, title: `position ${position}` });
  }

  drawPool(frame) {
    const { block_size: size, num_blocks: total } = this.model.get("header");
    const owners = new Map();
    for (const [id, [blocks, computed]] of Object.entries(frame.tables)) {
      blocks.forEach((block, i) => {
        if (block === DROPPED) return;
        const fill = Math.max(0, Math.min(1, (computed - i * size) / size));
        owners.set(block, [...(owners.get(block) ?? []), [id, fill]]);
      });
    }
    const count = Math.min(total, MAX_CELLS);
    const columns = count <= 64 ? 12 : count <= 256 ? 24 : 36;
    const [cell, gap] = [360 / columns, columns > 24 ? 1 : 2];
    const cached = new Set(frame.cached_blocks);
    const cells = Array.from({ length: count }, (_, b) =>
      poolCell(b, (b % columns) * cell, Math.floor(b / columns) * cell, cell - gap, owners.get(b) ?? [], this.colors, this.sequenceId, cell > 24, cached.has(b)));
    const height = Math.ceil(count / columns) * cell;
    this.pool.innerHTML = `<svg viewBox="-1 -1 362 ${height + 2}" aria-hidden="true">${cells.join("")}</svg>`;
    this.pool.setAttribute("aria-label", `${owners.size} of ${total} KV blocks are taken`);
    this.drawPoolLegend(frame, count < total ? `${total - count} more blocks not drawn` : null);
  }

  drawPoolLegend(frame, rest) {
    const entry = (color, label) => h("span", {}, [h("i.pd-swatch", { style: `background:var(--pd-${color})` }), label]);
    const residents = Object.keys(frame.tables).slice(0, 8).map((id) => entry(`seq-${this.colors[id]}`, `sequence ${id}`));
    clear(this.poolLegend, ...residents, entry("wasted", "taken, empty"), entry("free", "free"), frame.cached_blocks?.length ? h("span", {}, [h("i.pd-swatch", { style: "background:var(--pd-free);outline:1.5px dashed var(--pd-cached)" }), "free, a cached prefix"]) : null, rest ? h("span", {}, [rest]) : null);
  }

  drawStep(frame) {
    const stages = Object.entries(frame.stage_s ?? {}).filter(([, s]) => s > 0);
    const sum = stages.reduce((total, [, s]) => total + s, 0);
    const total = Math.max(frame.wall_s ?? 0, sum);
    clear(this.stages, ...stages.map(([name, s]) => stageBar(name, s, total)));
    this.stages.setAttribute("aria-label", stages.map(([name, s]) => `${name} ${duration(s)}`).join(", "));
    clear(this.stageLegend, ...stages.map(([name, s]) => h("span", {}, [
      h("i.pd-swatch", { style: `background:var(--pd-stage-${name}, var(--pd-unknown))` }), `${name} `, h("span.pd-num", {}, [duration(s)]),
    ])));
    clear(this.metrics, ...this.metricValues(frame).map(([label, value]) =>
      h("div.pd-metric", {}, [h("b", {}, [value]), h("span", {}, [label])])));
  }

  metricValues(frame) {
    const { num_blocks: total } = this.model.get("header");
    const none = frame.step == null;
    const tokens = (frame.batch ?? []).reduce((n, [, , t]) => n + t, 0);
    return [
      ["wall time", none ? "–" : duration(frame.wall_s)],
      ["tokens computed", none ? "–" : String(tokens)],
      ["FLOPs", none ? "–" : quantity(frame.flops)],
      ["bytes, at least", none ? "–" : quantity(frame.bytes, "B")],
      ["FLOPs per byte", none || !frame.bytes ? "–" : digits(frame.flops / frame.bytes)],
      ["KV used", none ? "–" : quantity(frame.kv_used_bytes, "B")],
      ["KV wasted", none ? "–" : quantity(frame.kv_wasted_bytes, "B")],
      ["blocks free afterwards", none ? "–" : `${frame.num_free_blocks} / ${total}`],
    ];
  }

  drawFoot() {
    const { machine, provenance, cut } = this.model.get("header");
    clear(this.foot, provenanceTag(provenance), h("span", {}, [`times ${provenance} on ${machine}; FLOPs and bytes counted from the shapes that ran`]),
      cut ? h("span", {}, [`the last ${cut} steps are not shown`]) : null);
  }
}

/** Palette colour of what a sequence did in a step. */
const kindColor = (kind) => KIND_COLORS[kind] ?? kind;

function stageBar(name, seconds, total) {
  const share = (seconds / total) * 100;
  const text = share > 8 ? name : "";
  const style = `width:${share}%;background:var(--pd-stage-${name}, var(--pd-unknown));color:var(--pd-stage-on-${name}, #1B1F24)`;
  return h("span", { style, title: `${name}: ${duration(seconds)}` }, [text]);
}

const CACHED_RING = `stroke="var(--pd-cached)" stroke-width="1.6" stroke-dasharray="3 2"`;

/** One block of the pool as SVG: free, or filled from below by its owner; two owners share it diagonally. */
function poolCell(block, x, y, size, owners, colors, chosen, label, cached) {
  const r = size > 12 ? 3 : 1;
  const at = `x="${x}" y="${y}" width="${size}" height="${size}" rx="${r}"`;
  if (!owners.length) return `<g><title>block ${block}: free${cached ? ", a cached prefix" : ""}</title><rect ${at} fill="var(--pd-free)" ${cached ? CACHED_RING : ""}/>${cellLabel(block, x, y, size, "var(--pd-muted)", label)}</g>`;
  const fill = Math.max(...owners.map(([, f]) => f));
  const full = `x="${x}" y="${y + size * (1 - fill)}" width="${size}" height="${size * fill}" rx="${r}"`;
  const color = (id) => `var(--pd-seq-${colors[id] ?? 0})`;
  const [first, second] = [owners[0][0], owners[1]?.[0]];
  const shared = second == null ? "" : `<path d="M${x} ${y + size}L${x + size} ${y}V${y + size}z" fill="${color(second)}"/>`;
  const mine = owners.some(([id]) => id === chosen);
  const ring = mine ? `<rect x="${x - 0.5}" y="${y - 0.5}" width="${size + 1}" height="${size + 1}" rx="${r}" fill="none" stroke="var(--pd-text)" stroke-width="1.2"/>` : "";
  const text = fill > 0.65 ? `var(--pd-seq-on-${colors[first] ?? 0})` : "#1B1F24";
  const names = owners.map(([id]) => `sequence ${id}`).join(" and ");
  return `<g><title>block ${block}: ${escapeHtml(names)}, ${Math.round(fill * 100)} % filled</title><rect ${at} fill="var(--pd-wasted)"/><rect ${full} fill="${color(first)}"/>${shared}${ring}${cellLabel(block, x, y, size, text, label)}</g>`;
}

function cellLabel(block, x, y, size, color, wanted) {
  return wanted ? `<text x="${x + size / 2}" y="${y + size / 2 + 3.5}" fill="${color}">${block}</text>` : "";
}

function escapeHtml(text) {
  return text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

export default { render };
