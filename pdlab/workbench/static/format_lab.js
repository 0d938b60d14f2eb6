// The FormatLab: number formats of K and V, what they do to a prompt, by layer, head and channel.

const NAMES = ["fp32", "fp16", "bf16", "fp8", "int8", "int4"];
const PLAIN = ["fp32", "fp16", "bf16"]; // as they are, without scales
const SCALES = ["token", "head", "channel"];
const PRESETS = [
  ["bf16", "bf16"], ["fp8", "fp8"], ["int8", "int8"], ["int4", "int4"],
  ["KIVI", "int4:channel/int4:token:32"], ["KIVI the wrong way round", "int4:token:32/int4:channel"],
];
const FLOOR = 1e-3; // relative errors from 0.1% to 50% are told apart by colour, on a log scale
const CEILING = 0.5;
const PARTS = [["k", "K"], ["v", "V"], ["attended", "attention output"]];

function render({ model, el }) {
  const view = new FormatLab(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.stop();
}

class FormatLab {
  constructor(model) {
    this.model = model;
    this.build();
    const draw = () => this.draw();
    const events = ["kv_format", "result", "layer", "head", "busy", "message"].map((n) => [`change:${n}`, draw]);
    this.stop = listen(model, Object.fromEntries(events));
  }

  get = (name) => this.model.get(name);

  // ---- building ---------------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.state = h("span.pd-pill", { role: "status" });
    this.pickers = [new Picker("K", this.get("header"), () => this.picked()), new Picker("V", this.get("header"), () => this.picked())];
    this.presets = PRESETS.map(([name, format]) => h("button", { type: "button", title: format, onclick: () => this.choose(format) }, [name]));
    this.message = h("div.pd-fl-message", { role: "alert", hidden: true });
    this.sentences = h("ul.pd-fl-sentences", { "aria-live": "polite" });
    this.bytes = h("div.pd-fl-bytes");
    const [bytes, bytesBody] = section("KV bytes", "from the tensors, scales included");
    bytesBody.append(this.bytes);
    this.texts = h("div.pd-fl-texts");
    const [texts, textsBody] = section("The text that comes out", "greedy; from the first other token on, marked");
    textsBody.append(this.texts);
    this.root = h("div.pdlab.pd-format-lab", { role: "group", "aria-label": "KV format lab" }, [
      h("div.pd-head", {}, [this.title, this.state]),
      h("div.pd-row.pd-fl-controls", {}, this.pickers.map((p) => p.node)),
      h("div.pd-row.pd-fl-presets", { role: "group", "aria-label": "Known formats" }, this.presets),
      this.message, this.sentences,
      h("div.pd-cols", {}, [h("div.pd-fl-left", {}, [this.buildErrors(), this.buildChannels()]), h("div.pd-fl-side", {}, [bytes, texts])]),
      this.buildFoot(),
    ]);
    this.tip = tooltip(this.root);
  }

  buildErrors() {
    const [node, body] = section("Error by layer and head", "relative L2; choose a head below");
    this.grid = h("div.pd-fl-grid", { role: "img" });
    this.grid.addEventListener("pointerdown", (e) => this.pick(e));
    this.grid.addEventListener("pointermove", (e) => this.hover(e));
    this.grid.addEventListener("pointerleave", () => this.tip.hide());
    const ramp = [0, 1, 2, 3, 4].map((i) => `var(--pd-heat-${i})`).join(",");
    const scale = h("div.pd-fl-scale", {}, ["0.1%", h("span.pd-fl-ramp", { style: `background:linear-gradient(90deg,${ramp})` }), "50%", h("span", {}, ["log scale, the same for every format"])]);
    body.append(this.grid, scale);
    return node;
  }

  buildChannels() {
    const [node, body] = section("Channels of one head", null);
    const header = this.get("header");
    this.sliders = [["layer", header.num_layers], ["head", header.num_kv_heads]].map(([name, count]) => {
      const value = h("b.pd-num");
      const label = name === "head" ? "KV head" : name;
      const input = h("input", { type: "range", min: 0, max: count - 1, step: 1, "aria-label": label, oninput: () => this.set(name, +input.value) });
      return { name, label, value, input, node: h("label.pd-field", {}, [label, input, value]) };
    });
    this.channels = h("div.pd-fl-channels");
    body.append(h("div.pd-row", {}, this.sliders.map((s) => s.node)), this.channels);
    return node;
  }

  buildFoot() {
    const { model, num_prompt, machine } = this.get("header");
    return h("div.pd-foot", {}, [provenanceTag("measured"), h("span", {}, [`${model}, a prompt of ${num_prompt} tokens, on ${machine}`])]);
  }

  // ---- choosing ---------------------------------------------------------------------------

  picked() {
    const [k, v] = this.pickers.map((p) => p.format());
    this.choose(k === v ? k : `${k}/${v}`);
  }

  /** Ask for a format. One at a time: what is chosen meanwhile, the last of it, comes next. */
  choose(format) {
    this.wanted = format;
    if (!this.asked) this.ask();
    this.draw();
  }

  ask() {
    this.asked = this.wanted;
    this.wanted = null;
    this.model.set("message", ""); // an old one would pass for the answer
    this.model.save_changes();
    this.model.send({ type: "choose", kv_format: this.asked });
  }

  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
    this.draw();
  }

  pick(event) {
    const { layer, head, part } = event.target.dataset;
    if (layer === undefined) return;
    const { num_heads, num_kv_heads } = this.get("header");
    this.set("layer", +layer);
    this.set("head", part === "attended" ? Math.floor(head / (num_heads / num_kv_heads)) : +head);
  }

  hover(event) {
    const { layer, head, part } = event.target.dataset;
    if (layer === undefined) return this.tip.hide();
    const error = this.get("result").errors[part][layer][head];
    const name = PARTS.find(([p]) => p === part)[1];
    this.tip.show(event, [`${name}: ${percent(error)} off`, `layer ${layer}, ${part === "attended" ? "query head" : "KV head"} ${head}`]);
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    const result = this.get("result");
    if (!result.errors) return;
    if (this.asked && !this.get("busy") && (this.get("message") || this.answered(result))) {
      this.asked = null;
      if (this.wanted) this.ask();
    }
    const busy = Boolean(this.asked) || this.get("busy");
    this.root.setAttribute("aria-busy", String(busy));
    this.state.textContent = busy ? `computing ${this.asked ?? ""} …` : "done";
    this.state.hidden = !busy;
    this.message.textContent = this.get("message");
    this.message.hidden = !this.get("message") || busy;
    if (!busy) this.pickers.forEach((p, i) => p.show([result.k_format, result.v_format][i]));
    this.presets.forEach((b) => b.setAttribute("aria-pressed", String(this.isShown(b.title, result))));
    this.drawTitle(result);
    clear(this.sentences, ...result.sentences.map(([what, text]) => h("li", {}, [h("b", {}, [what]), ` ${text}`])));
    this.drawErrors(result);
    this.drawChannels(result);
    this.drawBytes(result);
    this.drawTexts(result);
    this.root.dataset.shown = `${result.kv_format} ${this.get("layer")}/${this.get("head")}`;
  }

  /** Whether the result is for what was asked: formats that Python writes out are compared by halves. */
  answered(result) {
    return this.isShown(this.asked, result);
  }

  isShown(format, { k_format, v_format }) {
    const { head_dim } = this.get("header");
    const [k, v = k] = format.split("/").map((half) => spelledOut(half, head_dim));
    return k === spelledOut(k_format, head_dim) && v === spelledOut(v_format, head_dim);
  }

  drawTitle({ bytes, errors, kv_format }) {
    const { fp32_bytes, bf16_bytes } = this.get("header");
    const less = (base) => (bytes < base ? `${Math.round((1 - bytes / base) * 100)}% less` : bytes > base ? `${Math.round((bytes / base - 1) * 100)}% more` : "as much");
    const off = mean(errors.attended) ? `attention ${percent(mean(errors.attended))} off` : "nothing is off";
    this.title.textContent = `${kv_format}: ${less(fp32_bytes)} than fp32, ${less(bf16_bytes)} than bf16; ${off}`.replace("as much than", "as much as");
  }

  drawErrors({ errors }) {
    const { num_layers, num_heads, num_kv_heads } = this.get("header");
    const [layer, head] = [this.get("layer"), this.get("head")];
    this.grid.style.gridTemplateColumns = `auto repeat(${num_layers}, minmax(0, 1fr))`;
    const cells = PARTS.flatMap(([part, name]) => {
      const rows = errors[part][0].map((_, row) => row);
      const kv = (row) => (part === "attended" ? Math.floor(row / (num_heads / num_kv_heads)) : row);
      return [h("div.pd-fl-part", {}, [name, h("span.pd-muted", {}, [`${percent(mean(errors[part]))} on average`])]),
        ...rows.flatMap((row) => [h("span.pd-fl-head", {}, [`head ${row}`]),
          ...errors[part].map((byHead, l) => h("i", { style: `background:${heat(byHead[row])}`, "data-part": part, "data-layer": l, "data-head": row, "data-chosen": l === layer && kv(row) === head }))])];
    });
    const ticks = Array.from({ length: num_layers }, (_, l) => h("span.pd-fl-tick", {}, [l % 5 ? "" : String(l)]));
    clear(this.grid, ...cells, h("span.pd-fl-head", {}, ["layer"]), ...ticks);
    const worst = PARTS.map(([part, name]) => `${name} ${percent(Math.max(...errors[part].flat()))}`).join(", ");
    this.grid.setAttribute("aria-label", `Relative errors by layer and head; the largest: ${worst}`);
  }

  drawChannels() {
    for (const { name, label, value, input } of this.sliders) {
      input.value = value.textContent = this.get(name);
      input.setAttribute("aria-valuetext", `${label} ${this.get(name)}`);
    }
    clear(this.channels, ...["K", "V"].flatMap((name, which) => {
      const sizes = this.row("sizes", which);
      const errors = this.row("channel_errors", which);
      const median = [...sizes].sort((a, b) => a - b)[Math.floor(sizes.length / 2)];
      const largest = sizes.indexOf(Math.max(...sizes));
      const ratio = sizes[largest] / median;
      const worst = errors.indexOf(Math.max(...errors));
      return [h("div.pd-fl-chart", {}, [
        h("div", {}, [h("b", {}, [name]), ` size by channel: ${largest} is ${digits(ratio)} times the median`]),
        bars(sizes, sizes[largest], (i) => sizes[i] > 4 * median ? "outlier" : "size", (i) => `channel ${i}: mean |${name}| ${digits(sizes[i])}`),
        h("div.pd-muted", {}, [errors[worst] ? `error, up to ${percent(errors[worst])} of the channel's size (${worst}); log scale, 0.1% to 100%` : "no error in any channel"]),
        bars([...errors].map(logHeight), 1, () => "error", (i) => `channel ${i}: ${percent(errors[i])} off`),
      ])];
    }));
  }

  /** One head's channels, out of float32 [2, num_layers, num_kv_heads, head_dim]. */
  row(name, which) {
    const { num_layers, num_kv_heads, head_dim } = this.get("header");
    const start = ((which * num_layers + this.get("layer")) * num_kv_heads + this.get("head")) * head_dim;
    return Array.from({ length: head_dim }, (_, i) => this.get(name).getFloat32(4 * (start + i), true));
  }

  drawBytes({ bytes, open_bytes, max_open, kv_format, perplexity }) {
    const { fp32_bytes, bf16_bytes } = this.get("header");
    const rows = [["fp32", fp32_bytes, "base"], ["bf16", bf16_bytes, "base"], [kv_format, bytes, "this"]];
    const head = ["", "a token", "1,024 tokens"].map((text) => h("span.pd-muted", {}, [text]));
    clear(this.bytes, ...head, ...rows.flatMap(([name, value, kind]) => [
      h(kind === "this" ? "b.pd-fl-name" : "span.pd-fl-name", {}, [name.replace("/", "/\u200b")]),
      h("div.pd-bar", { "data-kind": kind, style: `width:${(value / fp32_bytes) * 100}%` }),
      h("span.pd-num", {}, [quantity(value, "B")]), h("span.pd-num", {}, [quantity(value * 1024, "B")]),
    ]));
    if (open_bytes) {
      const all = `${quantity(open_bytes * max_open, "B")} for the ${max_open} that an engine makes room for by default`;
      this.bytes.append(h("div.pd-fl-open", {}, [h("b", {}, ["open blocks, fp32: "]), `${open_bytes.toLocaleString("en")} B beside these for each block that still fills; ${all}`]));
    }
    const [right, ours] = perplexity;
    const change = (ours / right - 1) * 100;
    const sign = change >= 0 ? "+" : "−";
    this.bytes.append(h("div.pd-fl-ppl", {}, [`Perplexity of the prompt: ${right.toFixed(2)} in fp32, ${ours.toFixed(2)} in this format (`, h("b", {}, [`${sign}${Math.abs(change).toFixed(1)}%`]), "). A prompt is short: judge by the long measurement."]));
  }

  drawTexts({ texts, first_difference, kv_format }) {
    const column = (name, tokens) => h("div", {}, [h("div.pd-muted", {}, [name]), h("div.pd-fl-text", {}, tokens.map((text, i) =>
      h("span", { "data-first": i === first_difference, "data-after": first_difference !== null && i > first_difference }, [visible(text)])))]);
    const same = first_difference === null ? `All ${texts[0].length} tokens are the same.` : `The first ${first_difference} tokens are the same; then another one is the most probable.`;
    clear(this.texts, column("fp32", texts[0]), column(kv_format, texts[1]), h("div.pd-fl-same", {}, [same]));
  }
}

/** Selects for one half of a KV format: its numbers, its scales, and how many channels share one. */
class Picker {
  constructor(name, header, changed) {
    const select = (label, options) => h("select", { "aria-label": `${name}: ${label}`, onchange: changed }, options.map((o) => h("option", { value: o }, [o])));
    this.headDim = header.head_dim;
    this.number = select("numbers", NAMES);
    this.scales = select("scales", SCALES);
    this.group = select("channels that share a scale", header.groups.map(String));
    this.node = h("fieldset.pd-fl-picker", {}, [h("legend", {}, [name]), this.number,
      h("label.pd-field", {}, ["scale per", this.scales]), h("label.pd-field", {}, ["and", this.group, "channels"])]);
    [this.scalesField, this.groupField] = this.node.querySelectorAll("label");
    this.enable();
    this.number.addEventListener("change", () => this.enable());
    this.scales.addEventListener("change", () => this.enable());
  }

  /** Only what the choice before it leaves open is there to be chosen. */
  enable() {
    this.scalesField.hidden = PLAIN.includes(this.number.value);
    this.groupField.hidden = this.scalesField.hidden || this.scales.value !== "token";
  }

  format() {
    if (PLAIN.includes(this.number.value)) return this.number.value;
    const group = +this.group.value === this.headDim || this.scales.value !== "token" ? "" : `:${this.group.value}`;
    return `${this.number.value}:${this.scales.value}${group}`;
  }

  show(format) {
    const [number, scales, group] = format.split(":");
    this.number.value = number;
    if (scales) this.scales.value = scales;
    if (scales) this.group.value = group ?? this.headDim;
    this.enable();
  }
}

/** One way to write what can be written in two, for comparing. */
function spelledOut(format, headDim) {
  if (format === "int4") return `int4:token:${Math.min(32, headDim & -headDim)}`; // divides both
  return ["fp8", "int8"].includes(format) ? `${format}:token` : format;
}

function bars(values, top, kind, label) {
  return h("div.pd-fl-bars", {}, values.map((v, i) =>
    h("span", { title: label(i) }, [h("i", { "data-kind": kind(i), style: `height:${Math.max(1.5, Math.min(100, (v / top) * 100))}%` })])));
}

function heat(error) {
  const t = Math.max(0, Math.min(1, Math.log(Math.max(error, 1e-9) / FLOOR) / Math.log(CEILING / FLOOR))) * 4;
  const i = Math.min(3, Math.floor(t));
  return `color-mix(in srgb, var(--pd-heat-${i + 1}) ${((t - i) * 100).toFixed(0)}%, var(--pd-heat-${i}))`;
}

const logHeight = (error) => Math.log10(Math.max(error, FLOOR) / FLOOR) / 3;
const mean = (rows) => rows.flat().reduce((a, b) => a + b, 0) / rows.flat().length;
const percent = (part) => `${digits(part * 100)}%`;
const visible = (text) => text.replaceAll("\n", "↵\n") || "∅";

export default { render };
