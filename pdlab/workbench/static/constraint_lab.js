// The ConstraintLab: a constrained run, step by step: what the mask let through, and where the automaton is.

const KINDS = {
  regex: ["an expression", "the whole text must match it"],
  choice: ["a choice", "one text a line"],
  json_schema: ["a JSON schema", "the text is JSON that it allows"],
  grammar: ["a grammar", "in Lark's notation, as llguidance reads it"],
};
const MASKERS = { auto: "any masker", pdlab: "our own masker", llguidance: "llguidance" };
const [UNIT_X, UNIT_Y, RADIUS] = [74, 52, 14];

function render({ model, el }) {
  const view = new ConstraintView(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class ConstraintView {
  constructor(model) {
    this.model = model;
    this.arrow = uniqueId("arrow");
    this.asker = new Asker(model, () => this.drawState());
    this.build();
    this.stop = listen(model, {
      "change:frames": () => this.reload(),
      "change:step": () => this.model.get("step") !== this.transport.index && this.show(this.model.get("step")),
      "change:message": () => this.drawState(),
      "change:num_done": () => this.drawState(),
    });
  }

  destroy() {
    this.transport.pause();
    this.stop();
    this.asker.stop();
  }

  get = (name) => this.model.get(name);

  // ---- building ---------------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.pill = h("span.pd-pill", { role: "status" });
    this.message = h("div.pd-tb-message", { role: "alert", hidden: true });
    this.transport = new Transport({ go: (index) => this.go(index) });
    this.note = h("div.pd-note");
    this.text = h("div.pd-cl-text", { role: "group", "aria-label": "The text: choose a token to see its step" });
    const [bars, barsBody] = section("The next token", "before the mask and after it", "pd-cl-next");
    this.bars = h("div.pd-tb-bars");
    const swatch = (cls, label) => h("span", {}, [h(`i.pd-swatch.${cls}`), label]);
    barsBody.append(this.bars, h("div.pd-legend", {}, [swatch("pd-tb-before", "before"), swatch("pd-tb-after", "✓ allowed"), swatch("pd-tb-chosen", "taken"), swatch("pd-tb-gone", "✕ forbidden")]));
    this.facts = h("div.pd-cl-facts");
    const [automaton, automatonBody] = section("The automaton", null, "pd-cl-automaton");
    this.automatonHint = h("span.pd-hint");
    automaton.querySelector(".pd-section-title").append(this.automatonHint);
    this.drawingNode = h("div", { role: "img" });
    automatonBody.append(this.drawingNode);
    this.automaton = automaton;
    this.root = h("div.pdlab.pd-constraint-lab", { role: "group", "aria-label": "Constraint lab", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.title, this.pill]), this.buildForm(), this.message, this.text, this.transport.node,
      h("div.pd-cl-cols", {}, [h("div.pd-cl-left", {}, [bars]), h("div.pd-cl-right", {}, [this.facts, automaton])]),
      this.buildFoot(),
    ]);
  }

  buildForm() {
    const keys = (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && !event.shiftKey && (this.kind.value === "regex" || event.ctrlKey || event.metaKey)) (event.preventDefault(), this.run());
    };
    this.kind = h("select", { "aria-label": "Kind of constraint", onchange: () => this.kindChosen() }, Object.entries(KINDS).map(([value, [label]]) => h("option", { value }, [label])));
    this.source = h("textarea.pd-cl-source", { rows: 1, spellcheck: "false", "aria-label": "The constraint", onkeydown: keys, oninput: () => this.fitSource() });
    this.source.setAttribute("data-lm-suppress-shortcuts", "true");
    this.masker = h("select", { "aria-label": "Masker", onchange: () => this.run() }, Object.entries(MASKERS).map(([value, label]) => h("option", { value }, [label])));
    const box = (name, label) => h("input.pd-tb-box", { type: "text", inputmode: "decimal", size: 4, "aria-label": label, onkeydown: (e) => e.stopPropagation(), onchange: () => this.run() });
    [this.temperature, this.seed] = [box("temperature", "temperature"), box("seed", "seed")];
    this.runButton = h("button", { type: "button", title: "Run with this constraint (Enter; Ctrl+Enter where it has several lines)", onclick: () => this.run() }, ["Run"]);
    return h("div.pd-cl-form", {}, [this.kind, this.source, this.runButton, h("label.pd-field", {}, ["temperature", this.temperature]), h("label.pd-field", {}, ["seed", this.seed]), this.masker]);
  }

  buildFoot() {
    this.foot = h("div.pd-foot");
    return this.foot;
  }

  // ---- asking -----------------------------------------------------------------------------

  kindChosen() {
    this.source.value = this.get("header").examples[this.kind.value] ?? "";
    this.fitSource();
    this.source.title = KINDS[this.kind.value][1];
    this.source.focus();
  }

  /** As high as its text, within bounds. */
  fitSource() {
    this.source.toggleAttribute("data-long", this.source.value.length > 60 && this.kind.value !== "choice");
    requestAnimationFrame(() => {
      this.source.style.height = "auto";
      this.source.style.height = `${Math.max(32, Math.min(112, this.source.scrollHeight + 2))}px`;
    });
  }

  run() {
    this.transport.pause();
    const { value: kind } = this.kind;
    this.asker.ask({ type: "run", values: { kind, source: this.source.value, backend: this.masker.value, temperature: readNumber(this.temperature.value), seed: readNumber(this.seed.value) } });
  }

  // ---- moving -----------------------------------------------------------------------------

  reload() {
    const { kind, source, backend, temperature, seed } = this.get("asked");
    [this.kind.value, this.source.value, this.masker.value, this.temperature.value, this.seed.value] = [kind, source, backend, temperature, seed];
    this.source.title = KINDS[kind][1];
    this.fitSource();
    this.frames = this.get("frames");
    this.transport.setBars(this.frames.map((f) => ({ height: Math.max(0.06, f.removed), color: f.forced ? "waiting" : "decode" })), "height: probability that the mask takes; grey: forced");
    const { model, vocab_size, machine, masker } = this.get("header");
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`${model}, ${vocab_size.toLocaleString("en")} tokens; masks by ${this.get("asked").masker}; on ${machine}`]));
    this.drawAutomaton();
    this.drawState();
    this.show(this.get("step"));
  }

  go(index) {
    this.show(index);
    if (this.get("step") === index) return;
    this.model.set("step", index);
    this.model.save_changes();
  }

  // ---- drawing ----------------------------------------------------------------------------

  /** What does not depend on the step: whether something runs, and what went wrong. */
  drawState() {
    const busy = this.asker.isBusy;
    this.root.setAttribute("aria-busy", String(busy));
    this.runButton.disabled = busy;
    const done = this.get("num_done");
    this.runButton.textContent = busy ? `running … ${done || ""}` : "Run";
    this.message.textContent = this.get("message");
    this.message.hidden = !this.get("message") || busy;
    this.root.dataset.answered = this.get("answered");
  }

  show(index) {
    const frame = this.frames[index];
    if (!frame) return;
    const vocab = this.get("header").vocab_size.toLocaleString("en");
    const count = `step ${index + 1} of ${this.frames.length}`;
    this.transport.show(index, count, `${count}: ${frame.num_allowed} tokens allowed`);
    this.drawTitle(frame, vocab);
    this.drawText(index);
    this.drawBars(frame);
    this.drawFacts(frame, index);
    this.lightAutomaton(frame);
    this.root.dataset.step = index;
  }

  drawTitle(frame, vocab) {
    this.pill.textContent = frame.taken === null ? "stuck" : frame.forced ? "forced" : frame.may_end ? "may end" : "free to choose";
    this.pill.dataset.kind = frame.forced ? "forced" : frame.may_end ? "end" : "";
    const allowed = frame.num_allowed || !frame.may_end ? `${frame.num_allowed.toLocaleString("en")} of ${vocab} tokens ${frame.num_allowed === 1 ? "is" : "are"} allowed` : "The text is complete: only its end is allowed";
    const taken = frame.taken ? ["; taken: ", h("b.pd-tb-hit", {}, tokenText(frame.taken.text))] : [", so nothing can be taken"];
    clear(this.title, allowed, ...taken);
  }

  drawText(index) {
    const chips = this.frames.filter((f) => f.taken).map((f, i) => h("button.pd-cl-chip", {
      type: "button", "data-kind": i === index ? "now" : i < index ? "before" : "later", "data-forced": f.forced, "aria-current": i === index, "data-key": i,
      title: `step ${i + 1}, id ${f.taken.id}${f.forced ? ": forced" : ""}`, onclick: () => this.go(i),
    }, tokenText(f.taken.text)));
    const prompt = this.get("header").prompt.trimEnd();
    const lead = h("span.pd-cl-prompt", { title: prompt }, [(prompt.length > 48 ? "…" : "") + prompt.slice(-48).replaceAll("\n", "↵")]);
    const end = index === this.frames.length - 1 ? h("span.pd-cl-end", {}, [this.get("ending")]) : null;
    keepFocus(this.text, () => clear(this.text, lead, ...chips, end));
    const now = this.text.querySelector("[aria-current]");
    if (now) this.text.scrollTop = now.offsetTop - this.text.clientHeight + now.offsetHeight + 8;
  }

  drawBars({ tokens, others, taken }) {
    const top = niceTop(Math.max(...tokens.map((t) => Math.max(t.before, t.after))));
    const rows = tokens.flatMap((t) => {
      const chosen = taken?.id === t.id;
      const label = `${visibleText(t.text)}: ${percent(t.before)} before, ${t.allowed ? `allowed, ${percent(t.after)} after` : "forbidden"}`;
      return [
        h("span.pd-tb-token", { title: `id ${t.id}`, "aria-label": label, "data-gone": !t.allowed, "data-chosen": chosen }, tokenText(t.text)),
        tokenBar({ before: t.before, after: t.after, gone: !t.allowed, chosen }, top),
        h("span.pd-num.pd-muted", {}, [percent(t.before)]), h("span.pd-num", {}, [t.allowed ? percent(t.after) : h("span.pd-tag", {}, ["forbidden"])]),
        h("span.pd-cl-mark", { "data-allowed": t.allowed, "aria-hidden": "true" }, [t.allowed ? "✓" : "✕"]),
      ];
    });
    const allowed = others.allowed ? `${others.allowed.toLocaleString("en")} of them allowed` : "none of them allowed";
    clear(this.bars, ...scaleRow(top, "before", "after"), ...rows,
      h("span.pd-tb-rest", {}, [`and ${others.num.toLocaleString("en")} others, ${allowed}: ${percent(others.before)} → ${percent(others.after)}`]));
  }

  drawFacts(frame, index) {
    const same = frame.taken && frame.free.id === frame.taken.id;
    const free = [h("code", {}, tokenText(frame.free.text)), same ? ", the same" : frame.free.allowed ? ", which is allowed: the dart hits another now" : ", which is forbidden here"];
    const rows = [
      ["the mask takes away", `${percent(frame.removed)} of the probability`],
      ["uncertainty", `${frame.entropy[0].toFixed(2)} bits before, ${frame.entropy[1].toFixed(2)} after`],
      ["without the mask", h("span", {}, free)],
      ["may the text end here?", frame.may_end ? "yes: it is complete" : "no, it is not complete yet"],
      ["chance of what was taken", frame.taken ? `${percent(frame.chance)} when it was drawn` : "–"],
    ];
    clear(this.facts, ...rows.flatMap(([name, value]) => [h("span.pd-muted", {}, [name]), h("span", {}, [value])]));
  }

  // ---- the automaton ----------------------------------------------------------------------

  drawAutomaton() {
    const { drawing, num_states, why } = this.get("automaton");
    this.states = null;
    this.automatonHint.textContent = num_states ? `${num_states} states; double ring: the text may end` : "";
    if (!drawing) return clear(this.drawingNode, h("div.pd-muted", {}, [why]));
    const [width, height] = [drawing.columns * UNIT_X + 30, drawing.rows * UNIT_Y + 24];
    const places = drawing.states.map(({ x, y }) => [x * UNIT_X + UNIT_X / 2 + 8, rowTop(y) + UNIT_Y / 2]);
    const both = new Set(drawing.edges.map((e) => `${e.from}>${e.to}`));
    const edges = drawing.edges.map((e) => edgeSvg(e, places, both.has(`${e.to}>${e.from}`), this.arrow)).join("");
    const states = drawing.states.map((s, i) => stateSvg(i, places[i], s.accepting)).join("");
    const marker = (name) => `<marker id="${this.arrow}${name}" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="10" orient="auto"><path d="M0 0L8 4L0 8z" class="pd-cl-head${name}"/></marker>`;
    this.drawingNode.innerHTML = `<svg viewBox="0 0 ${width} ${height}" width="${width}" style="min-width:${Math.min(width, 330)}px" aria-hidden="true"><defs>${marker("")}${marker("-now")}</defs>${edges}${states}</svg>`;
    this.states = this.drawingNode.querySelectorAll("g[data-state]");
  }

  lightAutomaton({ path }) {
    if (!this.states || !path) return this.drawingNode.setAttribute("aria-label", "No state is known");
    this.states.forEach((g) => g.removeAttribute("data-now"));
    this.drawingNode.querySelectorAll("g[data-edge]").forEach((g) => this.mark(g, false));
    this.states[path[0]]?.setAttribute("data-now", "here");
    for (const state of path.slice(1)) if (state !== path[0]) this.states[state].setAttribute("data-now", "next");
    for (let i = 1; i < path.length; i++) this.mark(this.drawingNode.querySelector(`g[data-edge="${path[i - 1]}>${path[i]}"]`), true);
    const steps = path.slice(1).join(", then ");
    this.drawingNode.setAttribute("aria-label", `In state ${path[0]}${steps ? `; the token leads to ${steps}` : ""}`);
  }

  mark(edge, on) {
    if (!edge) return;
    edge.toggleAttribute("data-now", on);
    edge.querySelector("path").setAttribute("marker-end", `url(#${this.arrow}${on ? "-now" : ""})`);
  }
}

function stateSvg(number, [x, y], accepting) {
  const ring = accepting ? `<circle cx="${x}" cy="${y}" r="${RADIUS - 3.5}" class="pd-cl-ring"/>` : "";
  return `<g data-state="${number}"><title>state ${number}${accepting ? ": the text may end here" : ""}</title><circle cx="${x}" cy="${y}" r="${RADIUS}"/>${ring}<text x="${x}" y="${y + 4.5}">${number}</text></g>`;
}

/** An arrow from one state to another: a loop, a line, a bow over what stands between, or along a lane to the next band. */
function edgeSvg({ from, to, label, all, lane }, places, hasReverse, arrow) {
  const [[x1, y1], [x2, y2]] = [places[from], places[to]];
  const [path, lx, ly] = from === to ? loopPath(x1, y1) : lane !== null ? lanePath(x1, y1, x2, y2, rowTop(lane)) : wayPath(x1, y1, x2, y2, hasReverse);
  return `<g data-edge="${from}>${to}"><title>${escapeXml(all)}</title><path d="${path}" marker-end="url(#${arrow})"/><text x="${lx}" y="${ly}">${escapeXml(label)}</text></g>`;
}

const rowTop = (y) => y * UNIT_Y + 20; // room for the loops of the first row

function lanePath(x1, y1, x2, y2, lane) {
  const reach = UNIT_X / 2;
  const path = `M${x1 + RADIUS} ${y1}C${x1 + reach + 12} ${y1} ${x1 + reach + 12} ${lane} ${x1} ${lane}H${x2}C${x2 - reach - 8} ${lane} ${x2 - reach - 8} ${y2} ${x2 - RADIUS - 1} ${y2}`;
  return [path, Math.max(x1, x2) - 26, lane + 4];
}

function loopPath(x, y) {
  const r = RADIUS;
  return [`M${x - 7} ${y - r + 1.5}C${x - 16} ${y - r - 18} ${x + 16} ${y - r - 18} ${x + 7} ${y - r + 0.5}`, x, y - r - 15];
}

function wayPath(x1, y1, x2, y2, hasReverse) {
  const [columns, rows] = [Math.round((x2 - x1) / UNIT_X), (y2 - y1) / UNIT_Y];
  let bow = 0;
  if (hasReverse) bow = 16;
  if (Math.abs(columns) > 1 && Math.abs(rows) < 0.4) bow = 22 + 8 * Math.abs(columns);
  if (columns === 0 && Math.abs(rows) > 1.2) bow = 30;
  const length = Math.hypot(x2 - x1, y2 - y1);
  const [nx, ny] = [(y2 - y1) / length, -(x2 - x1) / length]; // up for a way to the right
  const [cx, cy] = [(x1 + x2) / 2 + nx * bow * 1.6, (y1 + y2) / 2 + ny * bow * 1.6];
  const toward = (x, y, gap) => {
    const d = Math.hypot(cx - x, cy - y);
    return [x + ((cx - x) / d) * gap, y + ((cy - y) / d) * gap];
  };
  const [[ax, ay], [bx, by]] = [toward(x1, y1, RADIUS), toward(x2, y2, RADIUS + 1)];
  const [mx, my] = [(ax + 2 * cx + bx) / 4, (ay + 2 * cy + by) / 4];
  return [`M${ax} ${ay}Q${cx} ${cy} ${bx} ${by}`, mx + nx * 8, my + ny * 8 + 4];
}

const escapeXml = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

export default { render };
