// The ParallelPlanner: controls, the numbers of the chosen grid, and a row for each other one.
// Data: planner_data.py.

const PARTS = [["compute_s", "compute"], ["collective_s", "collectives"], ["waiting_s", "bubbles and sends"]];
const HELD = ["weights", "K and V", "activations"];
const PIECES = [null, 1, 2, 4, 8, 16, 32]; // null: as many as there are stages
const powers = (most) => Array.from({ length: Math.log2(most) + 1 }, (_, i) => 2 ** i);
const upTo = (most) => Array.from({ length: most }, (_, i) => i + 1);

function render({ model, el }) {
  const view = new ParallelPlanner(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.destroy();
}

class ParallelPlanner extends Lab {
  constructor(model) {
    super(model);
    this.build();
    const draw = () => this.asker.asked === null && this.drawSoon();
    this.listen({ "change:result": draw, "change:message": draw });
  }

  build() {
    const { models, devices, links, most_parallel: most } = this.get("header");
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.message = h("div.pd-pl-message", { role: "alert", hidden: true });
    const pick = (label, name, values, text) => {
      const keys = Object.keys(values);
      const node = h("select", { "aria-label": label, onchange: () => this.set({ [name]: keys[node.selectedIndex] }) }, keys.map((key) => h("option", { value: key }, [text(key, values[key])])));
      return { name, node, hint: values, group: group(label, node) };
    };
    this.picks = [pick("model", "model", models, (key) => key), pick("device", "device", devices, (key, told) => (key.includes(" ") ? key : told)), pick("link", "link", links, (key, told) => `${key}, ${told}`)];
    const number = (v) => v.toLocaleString("en");
    this.sliders = [
      ["tensor_parallel", slider("tensor parallel", "ranks over which every layer is cut", upTo(most), (v) => this.set({ tensor_parallel: v }), String)],
      ["pipeline_parallel", slider("pipeline parallel", "stages over which the layers are dealt out", upTo(most), (v) => this.set({ pipeline_parallel: v }), String)],
      ["micro_batches", slider("micro-batches", "most pieces that follow each other through the stages", PIECES, (v) => this.set({ micro_batches: v }), (v) => (v === null ? "stages" : String(v)))],
      ["prompt_tokens", slider("prompt", "tokens of the prompt, and of context for decodes", powers(131072).slice(4), (v) => this.set({ prompt_tokens: v }), number)],
      ["batch", slider("batch", "sequences that decode together", powers(512), (v) => this.set({ batch: v }), number)],
    ];
    this.tiles = h("div.pd-pp-tiles.pd-num");
    this.rows = h("div.pd-pp-rows", { role: "radiogroup", "aria-label": "grids: tensor x pipeline parallel" });
    this.legend = h("div.pd-legend.pd-pp-legend", { "aria-hidden": "true" }, [...PARTS.map(([, name]) => name), ...HELD].map((name) => h("span", {}, [h("i.pd-swatch", { "data-part": name }), name])));
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-lab.pd-parallel-planner", { role: "group", "aria-label": "Parallel planner" }, [
      h("div.pd-head", {}, [this.title]), this.message,
      h("div.pd-pl-controls", {}, [h("div.pd-pl-choices", {}, this.picks.map((p) => p.group)), h("div.pd-pl-sliders", {}, this.sliders.map(([, s]) => s.node))]),
      this.tiles, this.rows, this.legend, this.foot]);
  }

  draw() {
    const result = this.get("result");
    if (!result.choices) return;
    this.drawState();
    this.message.textContent = this.get("message");
    this.message.hidden = !this.get("message");
    const own = result.choices[result.chosen];
    clear(this.title, h("b", {}, [`${own.name}`]), ` tensor x pipeline: ${own.num_devices} device${own.num_devices > 1 ? "s" : ""}`, own.refusal ? h("span.pd-hint", {}, [` ${own.short}`]) : h("span.pd-hint", {}, [" predicted"]));
    if (!this.asker.isBusy) for (const [name, control] of this.sliders) control.sync(this.get(name));
    for (const { name, node, hint } of this.picks) (node.value = this.get(name)), (node.title = hint[node.value]);
    this.drawTiles(result, own);
    this.drawRows(result);
    clear(this.foot, provenanceTag("predicted"), h("span", {}, [`${result.line}; ${result.basis.replace(/^predicted: /, "")}; a row chooses its grid`]));
    this.root.dataset.answered = this.get("answered");
    this.root.dataset.grid = own.name;
  }

  drawState() {
    this.root.setAttribute("aria-busy", String(this.asker.isBusy));
  }

  // ---- the chosen grid --------------------------------------------------------------------

  drawTiles(result, own) {
    if (own.refusal) return clear(this.tiles, h("div.pd-pp-refusal", {}, [own.refusal]));
    const one = result.choices.find((c) => c.num_devices === 1);
    const tile = (label, value, unit, note) => h("div.pd-pp-tile", {}, [h("span.pd-pl-label", {}, [label]), h("b.pd-pl-value", {}, [value, h("small", {}, [` ${unit}`])]), h("span.pd-hint", {}, [note])]);
    const against = (name) => (one?.[name] && own !== one ? `${digits(one[name].time_s / own[name].time_s)} × as fast as one device` : `bubbles: ${Math.round(100 * own[name].bubble_share)}%`);
    const held = own.memory.reduce((sum, n) => sum + n, 0);
    const room = result.memory_bytes;
    clear(this.tiles,
      tile("TTFT", ...duration(own.ttft.time_s).split(" "), against("ttft")), tile("TPOT", ...duration(own.tpot.time_s).split(" "), against("tpot")),
      tile("output", digits(own.tokens_s), "tokens/s", `${digits(own.tokens_s / own.num_devices)} a device`),
      tile("memory", digits(held / 1e9), "GB", room ? `of ${digits(room / 1e9)} GB, on the fullest rank` : "on the fullest rank"),
      tile("room for K and V", room ? quantity(own.kv_capacity) : "–", "tokens", room ? `${digits(own.kv_capacity / (this.get("prompt_tokens") + 1))} sequences as long` : "memory is not known"));
  }

  // ---- all grids --------------------------------------------------------------------------

  drawRows(result) {
    const times = ["ttft", "tpot"].map((name) => Math.max(...result.choices.map((c) => c[name]?.time_s ?? 0)) || 1);
    const total = (c) => (c.memory ?? [0]).reduce((sum, n) => sum + n, 0);
    const most = Math.max(...result.choices.map(total)) || 1;
    const head = ["grid", "TTFT", "TPOT", `memory${result.memory_bytes ? `, of ${digits(result.memory_bytes / 1e9)} GB` : ""}`].map((text) => h("span.pd-pp-h", {}, [text]));
    const focused = document.activeElement?.dataset?.grid;
    clear(this.rows, ...head, ...result.choices.flatMap((choice, i) => {
      const is = i === result.chosen;
      const button = h("button", { type: "button", role: "radio", "aria-checked": String(is), "data-grid": choice.name, "aria-label": this.told(choice), onclick: () => this.set({ tensor_parallel: choice.grid[0], pipeline_parallel: choice.grid[1] }) }, [choice.name]);
      const bars = choice.ttft ? ["ttft", "tpot"].map((name, k) => this.bar(PARTS.map(([part, label]) => [label, choice[name][part]]), times[k], duration(choice[name].time_s)))
        : [h("span.pd-pp-why", { title: choice.refusal }, [choice.short]), h("span")];
      const memory = choice.memory ? this.bar(HELD.map((label, k) => [label, choice.memory[k]]), most, `${digits(total(choice) / 1e9)} GB`, result.memory_bytes) : h("span");
      return [button, ...bars, memory];
    }));
    if (focused) this.rows.querySelector(`[data-grid="${focused}"]`)?.focus();
  }

  told(choice) {
    if (choice.refusal) return `${choice.name}: ${choice.refusal}`;
    return `${choice.name}: TTFT ${duration(choice.ttft.time_s)}, TPOT ${duration(choice.tpot.time_s)}, predicted`;
  }

  bar(parts, most, text, limit = null) {
    const share = (value) => `${(100 * value) / most}%`;
    const line = limit && limit <= most ? h("i.pd-pp-limit", { style: `left:${share(limit)}`, title: `the device has ${quantity(limit, "B")}` }) : null;
    const unit = limit === null ? duration : (v) => quantity(v, "B");
    return h("div.pd-pp-bar", { "aria-hidden": "true" }, [h("div.pd-pp-track", {}, [...parts.map(([label, value]) => h("i", { "data-part": label, style: `width:${share(value)}`, title: `${label}: ${unit(value)}` })), line]), h("span.pd-num", {}, [text])]);
  }
}

export default { render };
