// The AttentionView: one map on a canvas, the chosen query's row as shaded tokens, all heads small.

const LABEL_LIMIT = 40; // tokens up to which the axes carry the tokens themselves

function render({ model, el }) {
  const view = new AttentionMap(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class AttentionMap {
  constructor(model) {
    this.model = model;
    this.build();
    const redraw = () => this.draw();
    this.stop = listen(model, { "change:weights": () => this.reload(), "change:layer": redraw, "change:head": redraw, "change:query": redraw });
    this.stopAppearance = onAppearance(this.canvas, () => (this.readColors(), this.draw()));
  }

  destroy() {
    this.stop();
    this.stopAppearance();
  }

  // ---- building ---------------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.controls = h("div.pd-row.pd-att-controls");
    this.canvas = h("canvas", { role: "img" });
    this.scale = h("div.pd-att-scale");
    this.foot = h("div.pd-foot");
    const [row, rowBody] = section("What the chosen query looks at", "stronger colour, more weight");
    this.row = h("div.pd-att-tokens");
    rowBody.append(this.row);
    const [top, topBody] = section("Its largest weights");
    this.top = h("div.pd-cands");
    topBody.append(this.top);
    const [heads, headsBody] = section("All heads of this layer", "choose one");
    this.heads = h("div.pd-heads");
    headsBody.append(this.heads);
    this.root = h("div.pdlab.pd-attention", { role: "group", "aria-label": "Attention weights" }, [
      h("div.pd-head", {}, [this.title]), this.controls,
      h("div.pd-cols", {}, [h("div.pd-att-map", {}, [this.canvas, this.scale]), h("div.pd-att-side", {}, [row, top, heads])]),
      this.foot,
    ]);
    this.tip = tooltip(this.root);
    this.canvas.addEventListener("pointermove", (e) => this.hover(e));
    this.canvas.addEventListener("pointerleave", () => this.tip.hide());
    this.canvas.addEventListener("pointerdown", (e) => this.pick(e));
  }

  slider(name, label, max, toValue, toIndex) {
    const value = h("b.pd-num");
    const input = h("input", { type: "range", min: 0, max, step: 1, "aria-label": label, oninput: () => this.set(name, toValue(+input.value)) });
    const sync = () => {
      input.value = toIndex(this.model.get(name));
      value.textContent = this.model.get(name);
      input.setAttribute("aria-valuetext", `${label} ${this.model.get(name)}`);
    };
    return [h("label.pd-field", {}, [label, input, value]), sync];
  }

  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
    this.draw();
  }

  get = (name) => this.model.get(name);

  reload() {
    const [layers, heads, tokens] = ["layers", "heads", "tokens"].map(this.get);
    const one = (v) => v;
    const sliders = [
      this.slider("layer", "layer", layers.length - 1, (i) => layers[i], (v) => layers.indexOf(v)),
      this.slider("head", "head", heads.length - 1, (i) => heads[i], (v) => heads.indexOf(v)),
      this.slider("query", "query", tokens.length - 1, one, one),
    ];
    this.syncs = sliders.map(([, sync]) => sync);
    clear(this.controls, ...sliders.map(([node]) => node));
    this.maps = new Map();
    this.buildHeads();
    const { machine, source } = this.get("footer");
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`on ${machine}; weights ${source}`]));
    requestAnimationFrame(() => (this.readColors(), this.draw()));
  }

  buildHeads() {
    clear(this.heads, ...this.get("heads").map((head) =>
      h("button", { type: "button", "aria-label": `head ${head}`, onclick: () => this.set("head", head) }, [h("canvas"), `head ${head}`])));
  }

  // ---- data -------------------------------------------------------------------------------

  /** One map as numbers, decoded from float16 the first time it is asked for. */
  map(layer, head) {
    const heads = this.get("heads");
    const index = this.get("layers").indexOf(layer) * heads.length + heads.indexOf(head);
    if (!this.maps.has(index)) {
      const cells = this.get("side") ** 2;
      const view = this.get("weights");
      this.maps.set(index, Float32Array.from({ length: cells }, (_, i) => half(view.getUint16(2 * (index * cells + i), true))));
    }
    return this.maps.get(index);
  }

  readColors() {
    const stops = [0, 1, 2, 3, 4].map((i) => hexRgb(paletteColor(this.root, `heat-${i}`)));
    this.heat = Array.from({ length: 256 }, (_, i) => mix(stops, i / 255));
    const css = (name) => paletteColor(this.root, name);
    this.ink = { text: css("text"), muted: css("muted"), prefill: css("prefill"), decode: css("decode"), raised: css("raised") };
    const ramp = stops.map((c) => `rgb(${c})`).join(",");
    const tick = (t) => h("span", {}, [String(t)]);
    clear(this.scale, "weight", tick(0), h("span.pd-att-ramp", { style: `background:linear-gradient(90deg,${ramp})` }), tick(1),
      h("span", {}, ["(square-root scale)"]), h("span.pd-legend", {}, [
        h("span", {}, [h("i.pd-swatch", { style: "background:var(--pd-prefill)" }), "prefill rows"]),
        h("span", {}, [h("i.pd-swatch", { style: "background:var(--pd-decode)" }), "decode rows"])]));
  }

  /** An offscreen canvas of side x side pixels; colour by the square root of the weight. */
  image(layer, head) {
    const side = this.get("side");
    const canvas = h("canvas", { width: side, height: side });
    const context = canvas.getContext("2d");
    const image = context.createImageData(side, side);
    this.map(layer, head).forEach((w, i) => {
      if (Number.isNaN(w)) return; // stays transparent: not captured, or in the future
      image.data.set(this.heat[Math.min(255, Math.round(Math.sqrt(w) * 255))], 4 * i);
      image.data[4 * i + 3] = 255;
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    if (!this.heat || !this.syncs) return;
    this.syncs.forEach((sync) => sync());
    const [layer, head, query] = ["layer", "head", "query"].map(this.get);
    const factor = this.get("factor");
    const pooled = factor > 1 ? ` Each cell is the mean over ${factor} × ${factor} tokens.` : "";
    this.title.textContent = `Layer ${layer}, head ${head}: each row is a query, spread over the keys before it.${pooled}`;
    this.drawMap(layer, head, query);
    this.drawRow(layer, head, query);
    this.drawHeads(layer, head);
    this.root.dataset.shown = `${layer}/${head}/${query}`;
  }

  drawMap(layer, head, query) {
    this.width = Math.min(420, this.canvas.parentElement.clientWidth) || this.width || 420; // 0 while detached
    const width = this.width;
    const ratio = window.devicePixelRatio || 1;
    const labelled = this.get("tokens").length <= LABEL_LIMIT && width > 340;
    const margin = labelled ? 78 : 44;
    const plot = width - margin - 4;
    this.canvas.width = this.canvas.height = width * ratio;
    this.canvas.style.maxWidth = `${width}px`;
    const c = this.canvas.getContext("2d");
    c.scale(ratio, ratio);
    this.frame = { margin, plot, width };
    c.fillStyle = this.ink.raised;
    c.fillRect(margin, margin, plot, plot);
    c.imageSmoothingEnabled = false;
    c.drawImage(this.image(layer, head), margin, margin, plot, plot);
    this.drawPhases(c, margin, plot);
    this.drawAxes(c, margin, plot, labelled, query);
    const cell = plot / this.get("side");
    const row = Math.floor(query / this.get("factor"));
    c.strokeStyle = this.ink.text;
    c.lineWidth = 1.5;
    c.strokeRect(margin, margin + row * cell, Math.min(plot, (row + 1) * cell), cell);
    this.canvas.setAttribute("aria-label", `Attention map of layer ${layer}, head ${head}; the rows are queries, the columns keys`);
  }

  drawPhases(c, margin, plot) {
    const rows = this.get("rows");
    const step = plot / (this.get("side") * this.get("factor"));
    rows.forEach((row, i) => {
      if (!row) return;
      c.fillStyle = this.ink[row[0]];
      c.fillRect(margin - 6, margin + i * step, 4, step + 0.5);
    });
  }

  drawAxes(c, margin, plot, labelled, query) {
    const tokens = this.get("tokens");
    const cell = plot / (this.get("side") * this.get("factor"));
    c.textBaseline = "middle";
    const family = getComputedStyle(this.root).getPropertyValue("--pd-mono");
    c.font = labelled ? `${Math.min(12.5, Math.max(8, cell))}px ${family}` : `12.5px ${getComputedStyle(this.root).fontFamily}`;
    const every = labelled ? 1 : niceStep(tokens.length);
    for (let i = 0; i < tokens.length; i += every) {
      const name = labelled ? shorten(tokens[i][1]) : String(i);
      c.fillStyle = labelled && i === query ? this.ink.text : this.ink.muted;
      c.textAlign = "right";
      c.fillText(name, margin - 10, margin + (i + 0.5) * cell);
      c.save();
      c.translate(margin + (i + 0.5) * cell, margin - 6);
      if (labelled) c.rotate(-Math.PI / 2);
      c.textAlign = labelled ? "left" : "center";
      c.fillText(name, 0, labelled ? 0 : -4);
      c.restore();
    }
    if (labelled) return;
    c.fillStyle = this.ink.muted;
    c.textAlign = "center";
    c.fillText("key position", margin + plot / 2, 10);
    c.save();
    c.translate(8, margin + plot / 2);
    c.rotate(-Math.PI / 2);
    c.fillText("query position", 0, 0);
    c.restore();
  }

  /** The weights of one query over all keys; a pooled map gives each token its cell's mean. */
  rowWeights(layer, head, query) {
    const [side, factor] = [this.get("side"), this.get("factor")];
    const map = this.map(layer, head);
    const at = (key) => map[Math.floor(query / factor) * side + Math.floor(key / factor)];
    return this.get("tokens").map((_, key) => (key <= query ? at(key) : NaN));
  }

  drawRow(layer, head, query) {
    const weights = this.rowWeights(layer, head, query);
    const tokens = this.get("tokens");
    clear(this.row, ...tokens.map(([, text], key) => {
      const w = weights[key];
      const known = !Number.isNaN(w);
      const color = known ? this.heat[Math.round(Math.sqrt(Math.min(1, w)) * 255)] : null;
      const style = known ? `background:rgb(${color});color:${lightness(color) > 0.55 ? "#1B1F24" : "#fff"}` : "";
      return h("span.pd-w", { style, "data-future": !known, "data-query": key === query, title: known ? `key ${key}: ${w.toFixed(3)}` : "not seen" }, tokenText(text));
    }));
    const best = weights.map((w, key) => [w, key]).filter(([w]) => w > 0).sort((a, b) => b[0] - a[0]).slice(0, 5);
    const empty = h("div.pd-muted", { style: "grid-column:1/-1" }, ["This row was not captured."]);
    clear(this.top, ...(best.length ? best.flatMap(([w, key]) => [
      h("code", { title: `key position ${key}` }, tokenText(tokens[key][1])),
      h("div.pd-bar", { style: `width:${w * 100}%;background:rgb(${this.heat[190]});opacity:1` }),
      h("span.pd-num", {}, [w.toFixed(3)]),
    ]) : [empty]));
  }

  drawHeads(layer, chosen) {
    const side = this.get("side");
    this.get("heads").forEach((head, i) => {
      const button = this.heads.children[i];
      button.setAttribute("aria-pressed", String(head === chosen));
      const key = `${layer}/${this.ink.text}`;
      if (button.dataset.drawn === key) return;
      button.dataset.drawn = key;
      const canvas = button.firstChild;
      [canvas.width, canvas.height] = [side, side];
      canvas.getContext("2d").drawImage(this.image(layer, head), 0, 0);
    });
  }

  // ---- pointing ---------------------------------------------------------------------------

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const { margin, plot, width } = this.frame;
    const at = (value) => Math.floor((((value / box.width) * width - margin) / plot) * this.get("side"));
    const [key, query] = [at(event.clientX - box.left), at(event.clientY - box.top)];
    const inside = key >= 0 && query >= 0 && key < this.get("side") && query < this.get("side");
    return inside ? [query, key] : null;
  }

  hover(event) {
    const cell = this.cellAt(event);
    const weight = cell && this.map(this.get("layer"), this.get("head"))[cell[0] * this.get("side") + cell[1]];
    if (!cell || Number.isNaN(weight)) return this.tip.hide();
    const [query, key] = cell.map((i) => this.tokenRange(i));
    this.tip.show(event, [`weight ${weight.toFixed(4)}`, `query ${query}`, `key ${key}`]);
  }

  tokenRange(cell) {
    const [factor, tokens] = [this.get("factor"), this.get("tokens")];
    const first = cell * factor;
    if (factor > 1) return `positions ${first} to ${Math.min(tokens.length, first + factor) - 1}`;
    return `“${tokens[first][1].replaceAll("\n", "↵")}” at ${first}`;
  }

  pick(event) {
    const cell = this.cellAt(event);
    if (cell) this.set("query", Math.min(this.get("tokens").length - 1, cell[0] * this.get("factor")));
  }
}

function half(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * (1 + fraction / 1024) * 2 ** (exponent - 15) : sign * fraction * 2 ** -24;
}

const hexRgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const lightness = ([r, g, b]) => (0.3 * r + 0.59 * g + 0.11 * b) / 255;

function mix(stops, t) {
  const at = t * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((a, k) => Math.round(a + (stops[i + 1][k] - a) * (at - i)));
}

function niceStep(count) {
  return [5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((s) => count / s <= 8) ?? 5000;
}

function shorten(text) {
  const shown = text.replace(/^ +| +$/g, "").replaceAll("\n", "↵") || "·";
  return shown.length > 8 ? shown.slice(0, 7) + "…" : shown;
}

export default { render };
