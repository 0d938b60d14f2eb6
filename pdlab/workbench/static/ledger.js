// The MemoryLedger: the KV pool over all steps, and every byte of one step. Frames come from memory_ledger.py.

const PARTS = [
  ["used", "KV used", "mem-used"],
  ["wasted", "KV wasted: still empty", "mem-wasted"],
  ["others", "KV of other engines", null],
  ["cached", "KV cached: prefix kept", null],
  ["free", "KV free", "free"],
];
const TEXTURE = { cached: "pd-hatch", others: "pd-cross" };
const BOX = { left: 62, right: 12, top: 20, height: 204, host: 56, gap: 28, bottom: 26 };

function render({ model, el }) {
  const view = new Ledger(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class Ledger {
  constructor(model) {
    this.model = model;
    this.patterns = { cached: uniqueId("hatch"), others: uniqueId("cross") };
    this.build();
    this.stop = listen(model, {
      "change:frames": () => this.reload(),
      "change:step": () => this.model.get("step") !== this.index && this.show(this.model.get("step")),
    });
    this.stopAppearance = onAppearance(this.chart, () => this.frames && this.drawChart());
  }

  destroy() {
    this.transport.pause();
    this.stop();
    this.stopAppearance();
  }

  build() {
    this.transport = new Transport({
      go: (index) => (this.show(index), this.model.set("step", this.index), this.model.save_changes()),
    });
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.note = h("div.pd-note");
    this.chart = h("div.pd-lg-chart");
    const [side, sideBody] = section("This step, byte by byte", "hover: exact");
    side.classList.add("pd-lg-side");
    this.table = h("div.pd-lg-table");
    sideBody.append(this.table);
    const [all, allBody] = section("Everything on the device, to scale", "weights beside the KV pool", "pd-lg-all");
    this.bar = h("div.pd-lg-bar", { role: "img" });
    this.barLegend = h("div.pd-hint");
    allBody.append(this.bar, this.barLegend);
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-ledger", { role: "group", "aria-label": "Memory ledger", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.title]), this.note, this.transport.node,
      h("div.pd-cols", {}, [this.chart, side]), all, this.foot,
    ]);
    this.chart.addEventListener("pointerdown", (e) => this.transport.go(this.indexAt(e)));
    this.chart.addEventListener("pointermove", (e) => e.buttons && this.transport.go(this.indexAt(e)));
  }

  reload() {
    this.frames = this.model.get("frames");
    this.header = this.model.get("header");
    this.parts = PARTS.filter(([key]) => key !== "others" || this.header.shares_memory);
    this.transport.setBars(this.frames.map(() => ({ height: 0, color: "free" })), "");
    const { machine, cut, block_bytes: bytes, num_blocks: blocks } = this.header;
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`on ${machine}; ${blocks} blocks of ${quantity(bytes, "B")}; bytes counted from the tensors`]),
      cut ? h("span", {}, [`the last ${cut} steps are not shown`]) : null);
    this.show(this.model.get("step"));
  }

  show(index) {
    this.index = this.transport.clip(index);
    const frame = this.frames[this.index];
    this.title.textContent = frame.title;
    this.note.textContent = frame.note;
    this.transport.show(this.index, `engine step ${frame.step}`, frame.title);
    this.drawChart();
    this.drawTable(frame);
    this.drawBar(frame);
    this.root.dataset.step = this.index;
  }

  // ---- the chart --------------------------------------------------------------------------

  /** Pixels of a step's left edge and of a number of bytes; host memory has a scale of its own. */
  axes() {
    const width = (this.width = this.chart.clientWidth || this.width || 560); // 0 while detached
    const most = Math.max(this.header.pool, ...this.frames.map((f) => f.used + f.wasted + f.shared));
    const x = (i) => BOX.left + (i / this.frames.length) * (width - BOX.left - BOX.right);
    const y = (bytes) => BOX.top + BOX.height * (1 - bytes / most);
    const hostTop = BOX.top + BOX.height + BOX.gap;
    const hostHeight = this.header.host ? BOX.host : 0;
    const hostY = (bytes) => hostTop + hostHeight * (1 - bytes / this.header.host);
    const bottom = this.header.host ? hostTop + hostHeight : BOX.top + BOX.height;
    return { width, x, y, most, hostTop, hostHeight, hostY, bottom };
  }

  indexAt(event) {
    const box = this.chart.getBoundingClientRect();
    const share = (event.clientX - box.left - BOX.left) / (this.width - BOX.left - BOX.right);
    return Math.floor(share * this.frames.length);
  }

  /** The areas have the colours of the table beside them. */
  drawChart() {
    const a = this.axes();
    const limit = `<line class="pd-lg-limit" x1="${BOX.left}" x2="${a.width - BOX.right}" y1="${a.y(this.header.pool)}" y2="${a.y(this.header.pool)}"/>`;
    const label = `<text class="pd-strong" x="${a.width - BOX.right}" y="${a.y(this.header.pool) - 6}" text-anchor="end">KV pool ${quantity(this.header.pool, "B")}</text>`;
    const about = `KV pool over ${this.frames.length} steps; ${this.frames[this.index].title}`;
    this.chart.innerHTML = `<svg viewBox="0 0 ${a.width} ${a.bottom + BOX.bottom}" role="img" aria-label="${about}">${definitions(this.patterns)}${ticks(a)}${this.areas(a)}${limit}${label}${this.unshared(a)}${this.hostArea(a)}${this.cursor(a)}</svg>`;
    if (!this.frames.some((f) => f.shared)) return;
    const dashes = h("i", { style: "width:18px;border-top:2px dashed var(--pd-text)" });
    this.chart.append(h("div.pd-legend", {}, [h("span", {}, [dashes, "what sequences would hold without sharing"])]));
  }

  areas(a) {
    const base = this.frames.map(() => 0);
    return this.parts.map(([key, , color]) => {
      const low = [...base];
      this.frames.forEach((f, i) => (base[i] += f[key]));
      const fill = color ? `var(--pd-${color})` : `url(#${this.patterns[key]})`;
      return `<path data-part="${key}" d="${stairs(low, base, a.x, a.y)}" fill="${fill}"/>`;
    }).join("");
  }

  /** What sequences would hold if each had every block for itself. */
  unshared(a) {
    if (!this.frames.some((f) => f.shared)) return "";
    const tops = this.frames.map((f) => f.used + f.wasted + f.shared);
    const part = (v, i) => `${i && this.frames[i - 1].shared ? "L" : "M"}${a.x(i)} ${a.y(v)}H${a.x(i + 1)}`;
    const d = tops.map((v, i) => (this.frames[i].shared ? part(v, i) : "")).join("");
    return `<path class="pd-lg-unshared" d="${d}"/>`;
  }

  hostArea(a) {
    if (!this.header.host) return "";
    const zero = this.frames.map(() => 0);
    const all = zero.map(() => this.header.host);
    const area = (tops, color) => `<path d="${stairs(zero, tops, a.x, a.hostY)}" fill="var(--pd-${color})"/>`;
    const label = `<text class="pd-strong" x="${a.width - BOX.right}" y="${a.hostTop - 6}" text-anchor="end">host memory ${quantity(this.header.host, "B")}</text>`;
    return area(all, "free") + area(this.frames.map((f) => f.swapped), "mem-swapped") + label;
  }

  cursor(a) {
    const [x, width] = [a.x(this.index), a.x(this.index + 1) - a.x(this.index)];
    const label = `engine step ${this.frames[this.index].step}`;
    const at = Math.max(BOX.left + 48, Math.min(a.width - BOX.right - 48, x + width / 2));
    const text = `<text class="pd-strong" x="${at}" y="${a.bottom + 19}" text-anchor="middle">${label}</text>`;
    return `${text}<rect class="pd-lg-cursor" x="${x}" y="${a.y(a.most)}" width="${Math.max(1, width)}" height="${a.bottom - a.y(a.most)}" rx="2"/>`;
  }

  // ---- the step ---------------------------------------------------------------------------

  drawTable(frame) {
    const { pool, host, weights, open, dtype } = this.header;
    const rows = [["head", "KV pool", pool, null], ...this.parts.map(([key, name, color]) => [swatch(color, key), name, frame[key], frame[key] / pool])];
    if (host) {
      rows.push(["head", "Host memory", host, null], [swatch("mem-swapped"), "swapped blocks", frame.swapped, frame.swapped / host],
        [swatch("free"), this.header.shares_memory ? "free, or another engine's" : "free", frame.host_free, frame.host_free / host]);
    }
    rows.push(["head", "Beside the pools", null, null], [swatch("mem-weights"), `weights, ${dtype}`, weights, null]);
    if (open) rows.push([swatch("mem-open"), "open blocks, unquantized", open, null]);
    rows.push([swatch("mem-activations"), "activations, peak", frame.activations, null]);
    rows.push([h("span"), "saved by sharing", frame.shared, null]);
    clear(this.table, ...rows.flatMap((row) => this.row(...row)));
  }

  row(mark, name, bytes, share) {
    const head = mark === "head";
    const cell = (text, props = {}) => h(head ? "span.pd-lg-head" : "span", props, [text]);
    const measured = bytes == null ? (head ? "" : "not measured") : quantity(bytes, "B");
    const exact = bytes == null ? {} : { title: `${bytes.toLocaleString("en")} bytes`, "data-bytes": bytes };
    return [head ? cell("") : mark, cell(name), cell(measured, exact), cell(share == null ? "" : `${(share * 100).toFixed(share && share < 0.1 ? 1 : 0)} %`)];
  }

  drawBar(frame) {
    const parts = [["weights", "weights", this.header.weights, "mem-weights"], ...this.parts.map(([key, name, color]) => [key, name.split(":")[0], frame[key], color]),
      ["open", "open blocks", this.header.open, "mem-open"], ["activations", "activations", frame.activations ?? 0, "mem-activations"]].filter(([, , bytes]) => bytes);
    const total = parts.reduce((sum, [, , bytes]) => sum + bytes, 0);
    clear(this.bar, ...parts.map(([key, name, bytes, color]) => {
      const share = bytes / total;
      const room = share * (this.bar.clientWidth || 880) > 110 && color;
      const text = room ? `${name} ${(share * 100).toFixed(0)} %` : "";
      const style = `width:${share * 100}%;${color ? `background:var(--pd-${color});` : ""}color:${key === "free" ? "var(--pd-text)" : key === "used" ? "#FFFFFF" : "#1B1F24"}`;
      return h(color ? "span" : `span.${TEXTURE[key]}`, { style, title: `${name}: ${quantity(bytes, "B")}` }, [text]);
    }));
    this.bar.setAttribute("aria-label", parts.map(([, name, bytes]) => `${name} ${quantity(bytes, "B")}`).join(", "));
    clear(this.barLegend, `${quantity(total, "B")} in all: ${parts.map(([, name, bytes]) => `${name} ${quantity(bytes, "B")}`).join(", ")}`);
  }
}

const pattern = (id, ink) => `<pattern id="${id}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="7" height="7" fill="var(--pd-free)"/>${ink}</pattern>`;
const definitions = ({ cached, others }) => {
  const stripe = '<rect width="2.4" height="7" fill="var(--pd-mem-used)"/>';
  return `<defs>${pattern(cached, stripe)}${pattern(others, '<path d="M0 0H7M0 0V7" stroke="var(--pd-muted)" stroke-width="2.4"/>')}</defs>`;
};

/** The area between two step functions: one level for each step. */
function stairs(low, high, x, y) {
  const up = high.map((v, i) => `${i ? "L" : "M"}${x(i)} ${y(v)}H${x(i + 1)}`).join("");
  const down = low.map((v, i) => `L${x(i + 1)} ${y(v)}H${x(i)}`).reverse().join("");
  return `${up}${down}z`;
}

function ticks(a) {
  const step = niceStep(a.most / 4);
  const values = Array.from({ length: Math.floor(a.most / step) + 1 }, (_, i) => i * step);
  const rows = values.map((v) => `<text x="${BOX.left - 8}" y="${a.y(v) + 4.5}" text-anchor="end">${quantity(v, "B")}</text>`);
  return rows.join("");
}

function niceStep(value) {
  const decade = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((m) => m * decade).find((s) => s >= value);
}

function swatch(color, key) {
  return color ? h("i.pd-swatch", { style: `background:var(--pd-${color})` }) : h(`i.pd-swatch.${TEXTURE[key]}`);
}

export default { render };
