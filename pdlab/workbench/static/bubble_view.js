// The BubbleView: a lane a rank, bubbles hatched, and the part of bubbles by micro-batches. Data: pipeline_data.py.

function render({ model, el }) {
  const view = new BubbleView(model);
  el.replaceChildren(view.root);
  view.draw();
  return view.stop;
}

const PLOT = { left: 46, right: 14, top: 10, bottom: 34, width: 420, height: 190 };

class BubbleView {
  constructor(model) {
    this.model = model;
    this.build();
    const draw = () => this.draw();
    this.stop = listen(model, { "change:runs": draw, "change:run": draw, "change:steps": draw });
  }

  get = (name) => this.model.get(name);

  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
    this.draw();
  }

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.steps = h("select", { "aria-label": "Step", onchange: () => this.set("step", this.steps.selectedIndex) });
    this.slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Run", oninput: () => this.set("run", +this.slider.value) });
    this.runName = h("b");
    this.lanes = h("div.pd-bv-lanes");
    this.axis = h("div.pd-bv-axis.pd-num");
    this.legend = h("div.pd-legend.pd-bv-legend", { "aria-hidden": "true" });
    const [plot, plotBody] = section("Bubbles by micro-batches", "this step, all runs", "pd-bv-plot");
    this.plot = h("div");
    plotBody.append(this.plot);
    const [times, timesBody] = section("Time of the step", "from the first slot to the end of the last", "pd-bv-times");
    this.times = h("div.pd-bv-table");
    timesBody.append(this.times);
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-bubble-view", { role: "group", "aria-label": "Bubbles of a pipeline" }, [
      h("div.pd-head", {}, [this.title]),
      h("div.pd-row.pd-bv-controls", {}, [h("label.pd-field", {}, ["run", this.slider, this.runName]), h("label.pd-field", {}, ["step", this.steps])]),
      this.lanes, this.axis, this.legend, h("div.pd-cols.pd-bv-below", {}, [plot, times]), this.foot]);
    this.tip = tooltip(this.root);
  }

  draw() {
    const runs = this.get("runs");
    if (!runs.length) return;
    this.run = runs[Math.min(this.get("run"), runs.length - 1)];
    this.longest = Math.max(...runs.map((run) => run.wall_s));
    this.slider.max = runs.length - 1;
    this.slider.value = this.get("run");
    this.slider.setAttribute("aria-valuetext", this.run.name);
    this.slider.disabled = runs.length < 2;
    this.runName.textContent = this.run.name;
    const labels = this.get("steps");
    if (this.steps.options.length !== labels.length) clear(this.steps, ...labels.map((label) => h("option", {}, [label])));
    this.steps.selectedIndex = this.get("step");
    this.title.textContent = this.run.words;
    this.drawLanes();
    this.drawPlot(runs);
    this.drawTimes(runs);
    clear(this.foot, provenanceTag("measured"), h("span", {}, [`recorded on ${this.get("machine")}; a rank's time includes its sums within the stage`]),
      provenanceTag("predicted"), h("span", {}, ["(p − 1) / (m + p − 1) for p stages and m micro-batches that all take equally long (GPipe, Huang et al. 2019)"]));
    this.root.dataset.run = this.run.name;
    this.root.dataset.step = this.get("step");
  }

  // ---- lanes ------------------------------------------------------------------------------

  drawLanes() {
    const { slots, num_ranks: ranks, num_stages: stages, wall_s: wall, num_micro_batches: count } = this.run;
    const stage = (rank) => Math.floor((rank * stages) / ranks);
    const lanes = Array.from({ length: ranks }, (_, rank) => {
      const own = slots.filter((slot) => slot[0] === rank);
      const busy = own.reduce((sum, slot) => sum + slot[5] - slot[4], 0);
      const label = `rank ${rank}: ${own.length} micro-batches, idle ${Math.round(100 * (1 - busy / wall))}% of the step`;
      const bubble = h("i.pd-bv-bubble", { style: `left:0;width:${(100 * wall) / this.longest}%` });
      return h("div.pd-bv-row", {}, [
        h("span.pd-bv-name", {}, [`rank ${rank}`, stages < ranks ? h("span.pd-muted", {}, [` stage ${stage(rank)}`]) : null]),
        h("div.pd-bv-lane", { role: "img", "aria-label": label }, [bubble, ...own.map((slot) => this.slot(slot))])]);
    });
    clear(this.lanes, ...lanes);
    clear(this.axis, h("span", {}, ["0"]), h("span", {}, [duration(this.longest)]));
    const swatch = (i) => h("span", {}, [h("i.pd-swatch", { style: `background:var(--pd-seq-${i % 8})` }), `micro-batch ${i}`]);
    clear(this.legend, ...Array.from({ length: Math.min(count, 8) }, (_, i) => swatch(i)), h("span", {}, [h("i.pd-swatch.pd-bv-bubble"), "bubble: nothing to do"]));
  }

  slot([rank, piece, tokens, phase, start, end]) {
    const wide = (end - start) / this.longest;
    const node = h("i.pd-bv-slot", {
      style: `left:${(100 * start) / this.longest}%;width:${100 * wide}%;background:var(--pd-seq-${piece % 8});color:var(--pd-seq-on-${piece % 8})`,
    }, [wide > 0.03 ? String(piece) : ""]);
    node.addEventListener("pointermove", (e) => this.tip.show(e, [`rank ${rank}, micro-batch ${piece}`, `${tokens} tokens, ${phase}: ${duration(end - start)}`]));
    node.addEventListener("pointerleave", this.tip.hide);
    return node;
  }

  // ---- all runs ---------------------------------------------------------------------------

  drawPlot(runs) {
    const { left, right, top, bottom, width, height } = PLOT;
    const most = Math.max(2, ...runs.map((run) => run.num_micro_batches));
    const x = (m) => left + ((width - left - right) * Math.log2(m)) / Math.log2(most);
    const y = (share) => top + (height - top - bottom) * (1 - share);
    const stages = this.run.num_stages;
    const formula = (m) => (stages - 1) / (m + stages - 1);
    const curve = Array.from({ length: 41 }, (_, i) => most ** (i / 40)).map((m, i) => `${i ? "L" : "M"}${x(m).toFixed(1)} ${y(formula(m)).toFixed(1)}`).join("");
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((v) => `<line x1="${left}" x2="${width - right}" y1="${y(v)}" y2="${y(v)}" class="pd-bv-grid"/><text x="${left - 6}" y="${y(v) + 4}" text-anchor="end">${100 * v}%</text>`);
    const counts = [...new Set(runs.map((run) => run.num_micro_batches))];
    const marks = counts.map((m) => `<text x="${x(m)}" y="${height - bottom + 17}" text-anchor="middle">${m}</text>`);
    const points = runs.map((run) => `<circle cx="${x(run.num_micro_batches)}" cy="${y(run.bubble_share)}" r="${run === this.run ? 7 : 5}" data-own="${run === this.run}"/>`);
    const label = `Bubbles: ${runs.map((run) => `${run.num_micro_batches} micro-batches, ${percent(run.bubble_share)} measured, ${percent(run.formula_share)} predicted`).join("; ")}`;
    const node = h("div", { role: "img", "aria-label": label });
    node.innerHTML = `<svg viewBox="0 0 ${width} ${height}" aria-hidden="true">${ticks.join("")}${marks.join("")}<text x="${(left + width - right) / 2}" y="${height - 2}" text-anchor="middle">micro-batches of the step</text><path d="${curve}"/>${points.join("")}</svg>`;
    clear(this.plot, node, h("div.pd-legend", {}, [h("span", {}, [h("i.pd-bv-dot"), "measured"]), h("span", {}, [h("i.pd-bv-dash"), "predicted: (p − 1) / (m + p − 1)"])]));
  }

  drawTimes(runs) {
    const row = (run) => [
      h(run === this.run ? "b" : "span", {}, [run.name]),
      h("div.pd-bv-track", {}, [h("i", { style: `width:${(100 * run.wall_s) / this.longest}%` })]),
      h("span.pd-num", {}, [duration(run.wall_s)]), h("span.pd-num", {}, [percent(run.bubble_share)]), h("span.pd-num.pd-muted", {}, [percent(run.formula_share)])];
    const head = ["", "", "step", "bubbles", "predicted"].map((text) => h("span.pd-bv-h", {}, [text]));
    clear(this.times, ...head, ...runs.flatMap(row));
  }
}

const percent = (share) => `${Math.round(100 * share)}%`;

export default { render };
