// The RooflineView: log-log axes, two ceilings, one point a step. Solid is recorded, hollow predicted.

const BOX = { height: 430, left: 66, right: 18, top: 22, bottom: 50 };

function render({ model, el }) {
  const view = new Roofline(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class Roofline {
  constructor(model) {
    this.model = model;
    this.build();
    this.stop = listen(model, {
      "change:points": () => this.reload(), "change:machines": () => this.reload(),
      "change:selected": () => this.draw(), "change:machine": () => this.draw(),
    });
    this.stopAppearance = onAppearance(this.plot, () => this.points && this.draw());
  }

  destroy() {
    this.stop();
    this.stopAppearance();
  }

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => this.set("selected", +this.slider.value) });
    this.value = h("b.pd-num");
    this.select = h("select", { "aria-label": "Machine", onchange: () => this.set("machine", +this.select.value) });
    this.plot = h("div.pd-roof-plot");
    const [side, sideBody] = section("The highlighted step");
    side.classList.add("pd-roof-side");
    this.facts = h("div.pd-roof-facts.pd-num");
    sideBody.append(this.facts);
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-roofline", { role: "group", "aria-label": "Roofline" }, [
      h("div.pd-head", {}, [this.title]),
      h("div.pd-row.pd-roof-controls", {}, [h("label.pd-field", {}, ["step", this.slider, this.value]), h("label.pd-field", {}, ["machine", this.select])]),
      h("div.pd-cols", {}, [this.plot, side]),
      this.foot,
    ]);
    this.tip = tooltip(this.root);
    this.plot.addEventListener("pointermove", (e) => this.hover(e));
    this.plot.addEventListener("pointerleave", () => this.tip.hide());
    this.plot.addEventListener("click", (e) => e.target.dataset.index && this.set("selected", +e.target.dataset.index));
  }

  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
    this.draw();
  }

  reload() {
    this.points = this.model.get("points");
    this.machines = this.model.get("machines");
    this.slider.max = this.points.length - 1;
    const option = (m, i) => h("option", { value: i }, [i ? m.name : `this machine: ${m.name}`]);
    clear(this.select, ...this.machines.map(option));
    const { machine, dtype } = this.model.get("footer");
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`steps on ${machine}, ${dtype}; FLOPs and bytes counted from the shapes that ran`]));
    this.draw();
  }

  // ---- geometry ---------------------------------------------------------------------------

  get current() {
    return this.machines[this.model.get("machine")];
  }

  get predicted() {
    return this.model.get("machine") > 0;
  }

  /** Seconds of a point on the machine shown: recorded at home, predicted elsewhere. */
  seconds(index) {
    return this.predicted ? this.current.predicted_s[index] : this.points[index].wall_s;
  }

  place(index) {
    const p = this.points[index];
    return [p.flops / p.bytes, p.flops / this.seconds(index)];
  }

  /** Axes in decades that hold the ridge point, the roof and every point. */
  axes() {
    const { peak_flops_s: peak, bandwidth_bytes_s: bandwidth } = this.current;
    const places = this.points.map((_, i) => this.place(i));
    const xs = [...places.map(([x]) => x), peak / bandwidth];
    const ys = [...places.map(([, y]) => y), peak];
    const [x0, x1] = [floorDecade(Math.min(...xs) / 1.3), ceilDecade(Math.max(...xs) * 2.5)];
    const [y0, y1] = [floorDecade(Math.min(...ys) / 1.3), ceilDecade(peak * 1.4)];
    const width = (this.width = this.plot.clientWidth || this.width || 560); // 0 while detached
    const x = (v) => BOX.left + (Math.log10(v / x0) / Math.log10(x1 / x0)) * (width - BOX.left - BOX.right);
    const y = (v) => BOX.height - BOX.bottom - (Math.log10(v / y0) / Math.log10(y1 / y0)) * (BOX.height - BOX.top - BOX.bottom);
    return { x, y, x0, x1, y0, y1, peak, bandwidth, width };
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    const selected = this.model.get("selected");
    this.slider.value = selected;
    this.select.value = this.model.get("machine");
    this.value.textContent = this.points[selected].step;
    this.slider.setAttribute("aria-valuetext", `step ${this.points[selected].step}`);
    const a = this.axes();
    this.plot.innerHTML = `<svg viewBox="0 0 ${a.width} ${BOX.height}" role="img" aria-label="${escapeText(this.describe(selected))}">${grid(a)}${this.roof(a)}${this.marks(a, selected)}</svg>`;
    this.drawTitle(selected);
    this.drawFacts(selected);
    this.root.dataset.shown = `${this.model.get("machine")}/${selected}`;
  }

  bound(index) {
    const [intensity] = this.place(index);
    return intensity < this.current.peak_flops_s / this.current.bandwidth_bytes_s ? "memory" : "compute";
  }

  describe(index) {
    const p = this.points[index];
    return `Step ${p.step}, ${p.phase}: ${digits(p.flops / p.bytes)} FLOP per byte, ${this.bound(index)}-bound on ${this.current.name}`;
  }

  drawTitle(index) {
    const p = this.points[index];
    const name = { prefill: "Prefill", decode: "Decode", mixed: "Mixed step" }[p.phase];
    const ridge = digits(this.current.peak_flops_s / this.current.bandwidth_bytes_s);
    const where = { memory: `left of the ridge (${ridge}), memory is its ceiling`, compute: `right of the ridge (${ridge}), compute is its ceiling` };
    this.title.textContent = `${name}, ${digits(p.flops / p.bytes)} FLOP per byte: ${where[this.bound(index)]}`;
  }

  roof(a) {
    const ridge = a.peak / a.bandwidth;
    const startX = Math.max(a.x0, a.y0 / a.bandwidth);
    const path = `M${a.x(startX)} ${a.y(startX * a.bandwidth)}L${a.x(ridge)} ${a.y(a.peak)}H${a.x(a.x1)}`;
    const slope = Math.atan2(a.y(a.peak) - a.y(startX * a.bandwidth), a.x(ridge) - a.x(startX)) * (180 / Math.PI);
    const middle = Math.sqrt(startX * ridge);
    const [mx, my] = [a.x(middle), a.y(middle * a.bandwidth)];
    return `<path class="pd-roof" d="${path}"/>
      <line class="pd-ridge" x1="${a.x(ridge)}" x2="${a.x(ridge)}" y1="${a.y(a.peak)}" y2="${BOX.height - BOX.bottom}"/>
      <text x="${a.x(ridge) + 6}" y="${BOX.height - BOX.bottom - 8}">ridge ${digits(ridge)}</text>
      <text class="pd-strong" text-anchor="end" x="${a.x(a.x1)}" y="${a.y(a.peak) - 8}">${quantity(a.peak, "FLOP/s")}</text>
      <text class="pd-strong" text-anchor="middle" transform="translate(${mx} ${my}) rotate(${slope})" y="-8">${quantity(a.bandwidth, "B/s")}</text>`;
  }

  marks(a, selected) {
    const order = this.points.map((_, i) => i).filter((i) => i !== selected);
    const rest = order.map((i) => this.mark(a, i, false)).join("");
    const [intensity, achieved] = this.place(selected);
    const roof = Math.min(a.peak, intensity * a.bandwidth);
    const [x, y] = [a.x(intensity), a.y(achieved)];
    const gap = `<line class="pd-gap" x1="${x}" x2="${x}" y1="${y}" y2="${a.y(roof)}"/>`;
    const far = Math.min(150, a.width / 2);
    const anchor = x < far ? "start" : x > a.width - far ? "end" : "middle";
    const label = `<text class="pd-strong pd-halo" x="${x}" y="${y + 25}" text-anchor="${anchor}">${this.points[selected].phase}, ${this.predicted ? "predicted" : "recorded"}</text>`;
    return rest + gap + this.mark(a, selected, true) + label;
  }

  mark(a, index, big) {
    const [x, y] = this.place(index).map((v, i) => (i ? a.y(v) : a.x(v)));
    const phase = this.points[index].phase;
    const color = `var(--pd-${phase === "mixed" ? "transfer" : phase})`;
    const r = big ? 8 : 5;
    const fill = this.predicted ? "none" : color;
    const style = `fill="${fill}" stroke="${color}" fill-opacity="${big ? 1 : 0.55}" pointer-events="all" data-index="${index}" class="pd-point"`;
    if (phase === "prefill") return `<rect x="${x - r}" y="${y - r}" width="${2 * r}" height="${2 * r}" rx="1" ${style}/>`;
    if (phase === "decode") return `<circle cx="${x}" cy="${y}" r="${r}" ${style}/>`;
    return `<path d="M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}z" ${style}/>`;
  }

  drawFacts(index) {
    const [p, m] = [this.points[index], this.current];
    const counted = [
      ["phase", p.phase, null], ["tokens", String(p.num_tokens), null], ["requests", String(p.num_requests), null],
      ["FLOPs", quantity(p.flops), null], ["bytes, at least", quantity(p.bytes, "B"), null],
      ["FLOPs per byte", digits(p.flops / p.bytes), null],
    ];
    const home = [
      ["time", duration(p.wall_s), "recorded"], ["time at the roof", duration(m.predicted_s[index]), "predicted"],
      ["FLOP/s", quantity(p.flops / p.wall_s), "recorded"],
      ["MFU", percent(m.mfu[index]), "recorded"], ["MBU", percent(m.mbu[index]), "recorded"],
    ];
    const away = [
      ["time there", duration(m.predicted_s[index]), "predicted"], ["time here", duration(p.wall_s), "recorded"],
      ["roof to roof", `${digits(this.machines[0].predicted_s[index] / m.predicted_s[index])} ×`, "predicted"],
    ];
    const ceilings = [["peak", quantity(m.peak_flops_s, "FLOP/s"), m.provenance], ["bandwidth", quantity(m.bandwidth_bytes_s, "B/s"), m.provenance]];
    const row = ([name, value, kind]) => [h("span.pd-muted", {}, [name]), h("span.pd-num", {}, [value]), kind ? provenanceTag(kind) : h("span")];
    clear(this.facts, ...counted.flatMap(row), h("hr"), ...(this.predicted ? away : home).flatMap(row), h("hr"), ...ceilings.flatMap(row));
  }

  hover(event) {
    const index = event.target.dataset?.index;
    if (index == null) return this.tip.hide();
    const p = this.points[+index];
    const kind = this.predicted ? "predicted" : "recorded";
    this.tip.show(event, [`step ${p.step}, ${p.phase}`, `${p.num_tokens} tokens, ${quantity(p.flops)} FLOPs, ${quantity(p.bytes, "B")}`,
      `${duration(this.seconds(+index))} ${kind}, ${quantity(p.flops / this.seconds(+index), "FLOP/s")}`]);
  }
}

function grid(a) {
  const [bottom, right] = [BOX.height - BOX.bottom, a.width - BOX.right];
  const xs = decades(a.x0, a.x1).map((v) => `<line class="pd-grid" x1="${a.x(v)}" x2="${a.x(v)}" y1="${BOX.top}" y2="${bottom}"/><text x="${a.x(v)}" y="${bottom + 20}" text-anchor="middle">${quantity(v)}</text>`);
  const ys = decades(a.y0, a.y1).map((v) => `<line class="pd-grid" x1="${BOX.left}" x2="${right}" y1="${a.y(v)}" y2="${a.y(v)}"/><text x="${BOX.left - 8}" y="${a.y(v) + 4.5}" text-anchor="end">${quantity(v)}</text>`);
  return `${xs.join("")}${ys.join("")}
    <text x="${(BOX.left + right) / 2}" y="${BOX.height - 6}" text-anchor="middle">arithmetic intensity, FLOP per byte (log)</text>
    <text transform="translate(14 ${(BOX.top + bottom) / 2}) rotate(-90)" text-anchor="middle">FLOP/s (log)</text>`;
}

const floorDecade = (v) => 10 ** Math.floor(Math.log10(v));
const ceilDecade = (v) => 10 ** Math.ceil(Math.log10(v));
const percent = (v) => `${(v * 100).toFixed(v < 0.1 ? 1 : 0)} %`;
const escapeText = (t) => t.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);

function decades(from, to) {
  const count = Math.round(Math.log10(to / from));
  return Array.from({ length: count + 1 }, (_, i) => from * 10 ** i);
}

export default { render };
