// The TransferView: a prompt's steps, the parcels of its K and V, and the receiver, on one time axis that is 0
// when the prompt is computed. Data: transfer_data.py.

const BOX = { left: 104, right: 26, head: 26, lane: 30, gap: 8, foot: 30, axis: 46 };
const BLOCKS = { row: 34, between: 42 };

function render({ model, el }) {
  const view = new TransferView(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.destroy();
}

class TransferView {
  constructor(model) {
    this.model = model;
    this.build();
    const draw = () => this.draw();
    this.stop = listen(model, { "change:runs": draw, "change:view": draw, "change:choices": draw });
    this.stopAppearance = onAppearance(this.plot, draw);
  }

  destroy() {
    this.stop();
    this.stopAppearance();
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.select = h("select", { "aria-label": "Request", onchange: () => this.push("transfer", +this.select.value) });
    const tab = (view, label) => h("button", { type: "button", "data-view": view, onclick: () => this.push("view", view) }, [label]);
    this.tabs = h("div.pd-tv-tabs", { role: "group", "aria-label": "Time shown" }, [tab("whole", "whole transfer"), tab("hand-over", "around the prompt's end")]);
    const pointing = { onpointermove: (e) => this.hover(e), onpointerdown: (e) => this.hover(e), onpointerleave: () => this.leave() };
    this.plot = h("div.pd-tv-plot", pointing);
    this.blocks = h("div.pd-tv-plot.pd-tv-blocks", pointing);
    const [section_, body] = section("Blocks of both sides", "the same tokens, laid out anew", "pd-tv-tables");
    body.append(this.blocks);
    this.tables = section_;
    this.foot = h("div.pd-foot");
    const swatch = (style, label) => h("span", {}, [h("i.pd-swatch", { style }), label]);
    this.legend = h("div.pd-legend", {}, [
      swatch("background: var(--pd-prefill)", "its prompt"), swatch("background: var(--pd-transfer)", "K and V on the way: sent to arrived"),
      swatch("background: var(--pd-decode)", "its output"), swatch("background: var(--pd-muted); opacity: .3", "steps of others"),
      h("span", {}, [h("i.pd-swatch.pd-tv-waits"), "the receiver waits"]), swatch("background: var(--pd-cached)", "cached there: not sent")]);
    this.root = h("div.pdlab.pd-transfer-view", { role: "group", "aria-label": "TransferView" }, [
      h("div.pd-head", {}, [this.title]),
      h("div.pd-tv-controls", {}, [h("label.pd-field", {}, ["request", this.select]), this.tabs]),
      this.plot, this.legend, this.tables, this.foot]);
    this.tip = tooltip(this.root);
  }

  push(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
    if (name === "view") this.draw();
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    this.runs = this.model.get("runs");
    if (!this.runs.length) return;
    this.view = this.model.get("view");
    this.tips = [];
    const chosen = this.model.get("transfer");
    clear(this.select, ...this.model.get("choices").map((label, i) => h("option", { value: i, selected: i === chosen }, [label])));
    for (const tab of this.tabs.children) tab.setAttribute("aria-pressed", String(tab.dataset.view === this.view));
    this.title.textContent = this.headline();
    this.drawPlot();
    this.drawBlocks();
    const lines = new Map(this.runs.map((run) => [run.line, run.provenance]));
    const left = this.runs.reduce((sum, run) => sum + run.num_left_out, 0);
    clear(this.foot, ...[...lines].map(([line, kind]) => h("span", {}, [provenanceTag(kind), ` ${line.replace(/^(measured|simulated:) ?/, "")}`])),
      left ? h("span", {}, [`${left} short steps of others are not drawn`]) : null);
    this.root.dataset.shown = `${this.view}/${chosen}/${this.runs.map((run) => run.name).join(",")}`;
  }

  headline() {
    const waits = this.runs.map((run) => `${run.name} ${duration(run.wait_s)}`);
    if (this.runs.length > 1) return `After the prompt, the receiver waits: ${waits.join(", ")}`;
    const [run] = this.runs;
    return `${quantity(run.num_bytes, "B")} of K and V from ${run.source} to ${run.target}: ${duration(run.wait_s)} waited after the prompt`;
  }

  /** The seconds shown, the same for all runs. */
  span() {
    const low = Math.min(...this.runs.map((r) => r.start_s));
    const high = Math.max(...this.runs.map((r) => Math.max(r.next_s, r.end_s)), 1e-6);
    if (this.view === "whole") return [low, high + 0.03 * (high - low)];
    const after = Math.max(...this.runs.map((r) => r.ready_s), 0.1 * high, 1e-6);
    return [Math.max(low, -after), Math.min(high, 1.6 * after)];
  }

  drawPlot() {
    const width = (this.width = this.plot.clientWidth || this.width || 800); // 0 while detached
    const [low, high] = this.span();
    const [x0, x1] = [BOX.left, width - BOX.right];
    this.x = (s) => x0 + ((Math.max(low, Math.min(high, s)) - low) / (high - low)) * (x1 - x0);
    this.seen = (a, b) => b >= low && a <= high;
    const parts = [];
    let y = 0;
    for (const run of this.runs) {
      const [svg, tall] = this.panel(run, y, [x0, x1]);
      parts.push(svg);
      y += tall;
    }
    parts.push(this.axis(low, high, y));
    const hatch = uniqueId("tv-hatch");
    this.plot.innerHTML = `<svg width="${width}" height="${y + BOX.axis}" role="img" aria-label="${escapeText(this.describe())}">
      <defs><pattern id="${hatch}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="pd-tv-hatch" width="2" height="7"/></pattern></defs>${parts.join("").replaceAll("url(#hatch)", `url(#${hatch})`)}</svg>`;
  }

  describe() {
    return this.runs.map((run) => `${run.name}: ${quantity(run.num_bytes, "B")} in ${run.num_parcels} parcels, ${duration(run.wall_s)}; the receiver could go on ${duration(run.wait_s)} after the prompt`).join(". ");
  }

  /** One transfer from `y` down: its markup and how tall it is. */
  panel(run, y, [x0, x1]) {
    const rows = Math.max(1, run.num_layers);
    const field = Math.max(64, Math.min(this.runs.length > 1 ? 100 : 150, rows * 5)); // two fit a projector
    const p = y + BOX.head + 22;
    const top = p + BOX.lane + BOX.gap;
    const d = top + field + BOX.gap;
    const end = d + BOX.lane;
    const [zero, ready] = [this.x(0), this.x(run.ready_s)];
    const waits = run.wait_s > 0 && this.seen(0, run.ready_s) ? `<rect class="pd-tv-wait" x="${zero}" y="${p}" width="${Math.max(0, ready - zero)}" height="${end - p}"/><rect fill="url(#hatch)" x="${zero}" y="${d}" width="${Math.max(0, ready - zero)}" height="${BOX.lane}" ${this.mark([`${run.target} waits ${duration(run.wait_s)}`, `from the end of the prompt until K and V are there`])}/>` : "";
    const toTheLeft = x1 - zero < 190 && zero - x0 > x1 - zero;
    const told = Math.max(x1 - zero, zero - x0) > 190 ? "prompt computed: first token" : "first token";
    const label = (text, row, sub) => `<text class="pd-strong" x="0" y="${row + 15}">${escapeText(text)}</text><text x="0" y="${row + 32}">${sub}</text>`;
    const layers = run.num_layers ? `<text x="${x0 - 8}" y="${top + 12}" text-anchor="end">layer 0</text><text x="${x0 - 8}" y="${top + field - 2}" text-anchor="end">${run.num_layers - 1}</text>` : `<text x="${x0 + 8}" y="${top + field / 2 + 5}">all of it was cached there</text>`;
    const svg = `<g data-run="${escapeText(run.name)}">${this.head(run, y, x0)}
      <rect class="pd-tv-field" x="${x0}" y="${top}" width="${x1 - x0}" height="${field}"/>
      <path class="pd-tv-base" d="M${x0} ${p + BOX.lane}H${x1}M${x0} ${end}H${x1}"/>${waits}
      ${this.parcels(run, top, field / rows)}${this.steps(run.sender, p, "prefill", run)}${this.steps(run.receiver, d, "decode", run)}
      <path class="pd-tv-zero" d="M${zero} ${p - 5}V${end}"/><text class="pd-tv-halo" x="${toTheLeft ? zero + 4 : zero - 4}" y="${p - 8}" text-anchor="${toTheLeft ? "end" : "start"}">${told}</text>
      <path class="pd-tv-ready" d="M${ready} ${d - 4}V${end + 6}"/><text class="pd-tv-halo pd-strong" x="${ready}" y="${end + 22}" text-anchor="${anchorOf(ready, x0, x1)}">${run.target} can go on: +${duration(run.wait_s)}</text>
      ${label(run.source, p, "prompt")}${label(run.target, d, "output")}${layers}</g>`;
    return [svg, end - y + BOX.foot];
  }

  /** The name, and in one line what travelled, and how. */
  head(run, y, x0) {
    const early = run.num_bytes ? Math.round((100 * run.early_bytes) / run.num_bytes) : 0;
    const rate = run.on_the_way_s ? ` = ${quantity(run.num_bytes / run.on_the_way_s, "B/s")}` : "";
    const facts = run.num_bytes ? [`${quantity(run.num_bytes, "B")}, ${duration(run.on_the_way_s)} on the way${rate}`, `as ${run.wire}`, `${early} % there before the prompt's end`, run.transport] : ["nothing sent"];
    const label = run.link ? `simulated link: ${run.link}` : "";
    const room = (this.width - x0 - 8.6 * label.length - 20) / 7.6; // in characters, about
    while (facts.length && facts.join(" · ").length > room) facts.pop();
    const link = label ? `<tspan class="pd-tv-link" dx="10">${escapeText(label)}</tspan>` : "";
    return `<text x="0" y="${y + 18}"><tspan class="pd-strong pd-tv-name">${escapeText(run.name)}</tspan></text><text x="${x0}" y="${y + 18}">${escapeText(facts.join(" · "))}${link}</text>`;
  }

  steps(steps, y, own, run) {
    return steps.filter(([a, b]) => this.seen(a, b)).map(([a, b, mine, prompts, decodes]) => {
      const lines = [`step of ${duration(b - a)}`];
      if (mine) lines.push(own === "prefill" ? `${mine} prompt tokens of ${run.request}` : `${mine === 1 ? "a token" : `${mine} tokens`} of ${run.request}`);
      if (prompts) lines.push(`${prompts} prompt tokens of others`);
      if (decodes) lines.push(`${decodes} other requests decoded`);
      lines.push(`from ${signed(a)} to ${signed(b)}`);
      const w = Math.max(1, this.x(b) - this.x(a) - 1);
      return `<rect class="pd-tv-step" data-own="${mine ? own : ""}" x="${this.x(a).toFixed(2)}" y="${y + (mine ? 0 : 10)}" width="${w.toFixed(2)}" height="${mine ? BOX.lane : BOX.lane - 10}" ${this.mark(lines)}/>`;
    }).join("");
  }

  parcels(run, top, row) {
    const ranges = [...new Set(run.parcels.map((p) => p[2]))];
    return run.parcels.filter((p) => this.seen(p[5], p[6])).map(([first, end, start, stop, bytes, sent, arrived]) => {
      const what = end - first === 1 ? `layer ${first}` : `layers ${first} to ${end - 1}`;
      const lines = [`${what}, tokens ${start} to ${stop - 1}`, quantity(bytes, "B"), `sent at ${signed(sent)}, arrived at ${signed(arrived)}`, `${duration(arrived - sent)} on the way${arrived > sent ? `: ${quantity(bytes / (arrived - sent), "B/s")}` : ""}`];
      const w = Math.max(3, this.x(arrived) - this.x(sent));
      return `<rect class="pd-tv-parcel" data-odd="${ranges.indexOf(start) % 2}" x="${this.x(sent).toFixed(2)}" y="${(top + first * row).toFixed(2)}" width="${w.toFixed(2)}" height="${Math.max(1, (end - first) * row - (row > 3 ? 1 : 0)).toFixed(2)}" ${this.mark(lines)}/>`;
    }).join("");
  }

  axis(low, high, y) {
    const ticks = ticksOf(low, high, Math.max(2, Math.floor((this.width - BOX.left) / 110)));
    const marks = ticks.map((v) => `<path class="pd-tv-grid" d="M${this.x(v)} ${y}v6"/><text x="${this.x(v)}" y="${y + 21}" text-anchor="middle">${v ? signed(v) : "0"}</text>`);
    return `<path class="pd-tv-base" d="M${BOX.left} ${y}H${this.width - BOX.right}"/>${marks.join("")}<text x="${(BOX.left + this.width - BOX.right) / 2}" y="${y + 41}" text-anchor="middle">time after the prompt was computed</text>`;
  }

  // ---- blocks -----------------------------------------------------------------------------

  drawBlocks() {
    const found = new Map();
    for (const run of this.runs.filter((r) => r.blocks)) {
      const key = JSON.stringify([run.blocks.sizes, run.blocks.num_tokens, run.blocks.num_cached_tokens]);
      if (!found.has(key)) found.set(key, run); // the same layout once
    }
    this.tables.hidden = !found.size;
    const several = found.size > 1;
    const parts = [...found.values()].map((run) => this.layout(run, several));
    this.blocks.innerHTML = parts.join("");
  }

  layout(run, named) {
    const { sizes, num_drawn: drawn, num_tokens: total, num_cached_tokens: cached, sender, receiver } = run.blocks;
    const [x0, x1] = [BOX.left + 18, this.width - BOX.right];
    const slots = Math.max(...sizes.map((n) => Math.ceil(drawn / n) * n));
    const x = (token) => x0 + (token / slots) * (x1 - x0);
    const top = named ? 24 : 4;
    const low = top + BLOCKS.row + BLOCKS.between;
    const ribbons = Array.from({ length: Math.ceil(drawn / sizes[0]) }, (_, i) => {
      const [a, b] = [Math.max(i * sizes[0], cached), Math.min((i + 1) * sizes[0], drawn)];
      return b > a ? `<rect class="pd-tv-ribbon" data-odd="${i % 2}" x="${x(a) + 1}" y="${top + BLOCKS.row}" width="${x(b) - x(a) - 2}" height="${BLOCKS.between}"/>` : "";
    });
    const row = (side, y) => Array.from({ length: Math.ceil(drawn / sizes[side]) }, (_, i) => this.block(run, side, i, y, x)).join("");
    const label = (name, size, y) => `<text class="pd-strong" x="0" y="${y + 14}">${escapeText(name)}</text><text x="0" y="${y + 31}">blocks of ${size}</text>`;
    const numbers = sender.length || receiver.length ? "numbers: of the blocks in each pool" : "numbers: of the blocks in the table";
    const note = [`${total} tokens${cached ? `, ${cached} of them cached at ${run.target}` : ""}`, drawn < total ? `the first ${drawn} are drawn` : "", sizes[0] === sizes[1] ? "the same block size: copied block by block" : `each token moves to slot (position mod ${sizes[1]}) of block (position div ${sizes[1]})`, numbers].filter(Boolean).join(" · ");
    const height = low + BLOCKS.row + 4;
    return `<svg width="${this.width}" height="${height}" role="img" aria-label="${escapeText(`${run.source} holds blocks of ${sizes[0]} tokens, ${run.target} blocks of ${sizes[1]}`)}">${named ? `<text class="pd-strong" x="0" y="14">${escapeText(run.name)}</text>` : ""}${ribbons.join("")}${row(0, top)}${row(1, low)}${label(run.source, sizes[0], top)}${label(run.target, sizes[1], low)}</svg><div class="pd-tv-note">${escapeText(note)}</div>`;
  }

  block(run, side, i, y, x) {
    const { sizes, num_drawn: drawn, num_tokens: total, num_cached_tokens: cached } = run.blocks;
    const size = sizes[side];
    const [start, end] = [i * size, Math.min((i + 1) * size, total)];
    const table = side ? run.blocks.receiver : run.blocks.sender;
    const number = table[i] ?? i;
    const other = sizes[1 - side];
    const [from, to] = [Math.floor(start / other), Math.floor((end - 1) / other)];
    const others = (side ? run.blocks.sender : run.blocks.receiver).slice(from, to + 1);
    const names = others.length === to - from + 1 ? others.join(", ") : from === to ? `${from}` : `${from} to ${to}`;
    const peers = `${from === to ? "block" : "blocks"} ${names} of ${side ? run.source : run.target}`;
    const lines = [`block ${number} of ${side ? run.target : run.source}`, `tokens ${start} to ${end - 1}${end - start < size ? `; ${size - (end - start)} slots free` : ""}`, end <= cached ? (side ? "was in the prefix cache" : `not sent: cached at ${run.target}`) : `${side ? "from" : "to"} ${peers}`];
    const part = (a, b, kind) => (b > a ? `<rect data-kind="${kind}" x="${x(a) + (a === start ? 1.5 : 0)}" y="${y}" width="${Math.max(1, x(b) - x(a) - (a === start ? 1.5 : 0) - (b === start + size ? 1.5 : 0))}" height="${BLOCKS.row}"/>` : "");
    const sent = Math.max(start, Math.min(end, cached));
    const shown = Math.min(end, drawn);
    const filled = x(shown) - x(start);
    const text = filled > 22 ? `<text class="pd-tv-number" x="${x(start) + filled / 2}" y="${y + BLOCKS.row / 2 + 5}" text-anchor="middle">${number}</text>` : "";
    return `<g class="pd-tv-block" data-side="${side}" data-block="${i}" data-peers="${from}-${to}" ${this.mark(lines)}>${part(start, Math.min(sent, shown), side ? "cached" : "kept")}${part(sent, shown, "moved")}${part(end, start + size, "free")}${text}</g>`;
  }

  // ---- pointing ---------------------------------------------------------------------------

  /** Keep what a pointer tells here; returns the attribute that finds it again. */
  mark(lines) {
    return `data-tip="${this.tips.push(lines) - 1}"`;
  }

  hover(event) {
    const node = event.target.closest?.("[data-tip]");
    if (!node) return this.leave();
    this.tip.show(event, this.tips[+node.dataset.tip]);
    this.light(node);
  }

  light(node) {
    this.unlight();
    const peers = node.dataset.peers;
    if (!peers) return;
    const [from, to] = peers.split("-").map(Number);
    const side = node.dataset.side === "0" ? "1" : "0";
    node.dataset.lit = "true";
    for (const other of node.parentNode.querySelectorAll(`[data-side="${side}"]`)) if (+other.dataset.block >= from && +other.dataset.block <= to) other.dataset.lit = "true";
  }

  unlight() {
    for (const node of this.blocks.querySelectorAll("[data-lit]")) delete node.dataset.lit;
  }

  leave() {
    this.tip.hide();
    this.unlight();
  }
}

const signed = (seconds) => (seconds < 0 ? `−${duration(-seconds)}` : `+${duration(seconds)}`);
const anchorOf = (x, x0, x1) => (x < x0 + 80 ? "start" : x > x1 - 90 ? "end" : "middle");
const escapeText = (t) => String(t).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function ticksOf(low, high, count) {
  const least = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((t) => t >= least * 0.9999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)) + 0);
}

export default { render };
