// The SpeculationView: drafts step by step, acceptance by place, and the gain, predicted and measured.
// Data: speculation_data.py.

const MAX_CHIPS = 260; // tokens of the text that are drawn, the newest
const MAX_PLACES = 16; // places of a draft, and tokens a step, that have a bar
const FATES = { accepted: "✓ stands", rejected: "✗ rejected", "not looked at": "– not looked at" };
const DRAWN = { bonus: "+ one more: the draft was right to its end", resampled: "→ drawn in its place", plain: "drawn: nothing was drafted" };

function render({ model, el }) {
  const view = new SpeculationView(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

/** Leviathan et al. 2023, equation 1: tokens that a step with a draft of k tokens gives. */
function expectedTokens(acceptance, k) {
  let [tokens, reached] = [1, 1];
  for (let i = 0; i < k; i++) tokens += reached *= acceptance;
  return tokens;
}

/** Their theorem 3.8, where only a share of the steps has a draft and each drafted token makes the check longer. */
function predictedSpeedup({ acceptance, share }, k, costRatio, slope) {
  const seconds = 1 + k * (costRatio + slope);
  return (share * expectedTokens(acceptance, k) + 1 - share) / (share * seconds + 1 - share);
}

class SpeculationView {
  constructor(model) {
    this.model = model;
    this.build();
    this.stop = listen(model, {
      "change:frames": () => this.reload(),
      "change:run": () => this.reload(),
      "change:cost_ratio": () => this.drawSpeedup(),
      "change:step": () => this.get("step") !== this.index && this.show(this.get("step")),
    });
    this.stopAppearance = onAppearance(this.root, () => this.index !== undefined && this.scrollToEnd());
  }

  destroy() {
    this.transport.pause();
    this.stop();
    this.stopAppearance();
  }

  get = (name) => this.model.get(name);

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.note = h("div.pd-note");
    this.runSelect = h("select", { "aria-label": "Run", onchange: () => this.push({ run: this.runSelect.value }) });
    this.sequenceSelect = h("select", { "aria-label": "Sequence", onchange: () => this.push({ sequence_id: this.sequenceSelect.value }) });
    this.transport = new Transport({ go: (index) => this.go(index) });
    this.chips = h("div.pd-sv-text", { role: "group", "aria-label": "The text so far" });
    this.rows = h("div.pd-sv-rows");
    this.positions = h("div.pd-sv-plot");
    this.byTokens = h("div.pd-sv-plot");
    this.curve = h("div.pd-sv-plot");
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-speculation-view", { role: "group", "aria-label": "Speculation", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.title, this.runSelect, this.sequenceSelect]), this.note, this.transport.node,
      h("div.pd-cols", {}, [h("div.pd-sv-left", {}, this.leftColumn()), h("div.pd-sv-right", {}, this.rightColumn())]), this.foot]);
  }

  leftColumn() {
    const [text, textBody] = section("Text so far", "who wrote each token");
    const entry = (kind, label) => h("span", {}, [h("i.pd-swatch", { "data-kind": kind }), label]);
    textBody.append(this.chips, h("div.pd-legend.pd-sv-legend", {}, [
      entry("drafted", "drafted, and it stood"), entry("drawn", "drawn by the model"), entry("match", "stands before, too: what the draft was copied behind"), entry("copied", "what it copied")]));
    const [draft, draftBody] = section("The draft of this step", "", "pd-sv-draft");
    this.ruleHint = h("span.pd-hint");
    draft.querySelector(".pd-section-title").append(this.ruleHint);
    draftBody.append(this.rows);
    return [text, draft];
  }

  rightColumn() {
    const [positions, positionsBody] = section("Acceptance by place in the draft", "of the tokens looked at there");
    positionsBody.append(this.positions);
    const [tokens, tokensBody] = section("Tokens a step", "");
    this.tokensHint = h("span.pd-hint");
    tokens.querySelector(".pd-section-title").append(this.tokensHint);
    tokensBody.append(this.byTokens);
    const [gain, gainBody] = section("Speed-up by draft length", "", "pd-sv-gain");
    this.ratio = h("input", { type: "range", min: 0, max: 1, step: 0.005, "aria-label": "Cost ratio: drafting a token, in plain steps", oninput: () => this.setRatio(+this.ratio.value) });
    this.ratioText = h("b.pd-num");
    this.ratioReset = h("button", { type: "button", title: "Back to what was measured", onclick: () => this.setRatio(this.told().cost_ratio) }, ["measured"]);
    gainBody.append(this.curve, h("div.pd-sv-gain-legend.pd-legend"), h("label.pd-field.pd-sv-ratio", {}, ["cost ratio c", this.ratio, this.ratioText, this.ratioReset]));
    this.gainLegend = gainBody.querySelector(".pd-sv-gain-legend");
    return [positions, tokens, gain];
  }

  // ---- moving -----------------------------------------------------------------------------

  told = () => this.get("runs").find((run) => run.name === this.get("run"));

  reload() {
    this.frames = this.get("frames");
    const options = (select, names, text) => {
      clear(select, ...names.map((name) => h("option", { value: name }, [text(name)])));
      select.hidden = names.length < 2;
    };
    options(this.runSelect, this.get("runs").map((run) => run.name), (name) => name);
    options(this.sequenceSelect, this.get("sequences"), (name) => `sequence ${name}`);
    this.runSelect.value = this.get("run");
    this.sequenceSelect.value = this.get("sequence_id");
    const most = Math.max(...this.frames.map((f) => f.put_out), 1);
    this.transport.setBars(this.frames.map((f) => ({ height: f.put_out / most, color: f.phase === "prefill" ? "prefill" : f.put_out > 1 ? "draft" : "decode" })),
      `bar: tokens that the step gave, at most ${most}; violet where drafted ones stood`);
    this.drawPositions();
    this.drawByTokens();
    this.drawSpeedup();
    this.drawFoot();
    this.show(this.get("step"));
  }

  go(index) {
    this.show(index);
    if (this.get("step") !== this.index) this.push({ step: this.index });
  }

  push(values) {
    for (const [key, value] of Object.entries(values)) this.model.set(key, value);
    this.model.save_changes();
  }

  setRatio(value) {
    this.push({ cost_ratio: Math.min(1, value) });
    this.drawSpeedup();
  }

  show(index) {
    this.index = this.transport.clip(index);
    const frame = this.frames[this.index];
    this.drawHead(frame);
    this.drawText(frame);
    this.drawRows(frame);
    this.scrollToEnd();
    this.root.dataset.frame = this.index;
  }

  // ---- one step ---------------------------------------------------------------------------

  drawHead(frame) {
    const drafted = frame.draft.length;
    const stood = frame.draft.filter((token) => token.fate === "accepted").length;
    const gave = `${frame.put_out} token${frame.put_out === 1 ? "" : "s"} in one step`;
    const title = drafted ? `${drafted} drafted, ${stood} stand${stood === 1 ? "s" : ""}: ${gave}`
      : frame.phase === "prefill" ? "The prompt is computed, and its first token drawn" : "Nothing drafted: one token in one step";
    this.title.textContent = title;
    const others = frame.batch > 1 ? `, ${frame.batch} sequences in it` : "";
    const drafting = drafted ? `, ${duration(frame.draft_s)} of them for drafting` : "";
    const ended = frame.finish_reason ? ` Finished: ${frame.finish_reason}.` : "";
    this.note.textContent = `Engine step ${frame.step} took ${duration(frame.wall_s)}${drafting}${others}.${ended}`;
    this.transport.show(this.index, `step ${this.index + 1} of ${this.frames.length}`, title);
  }

  /** What each token of the output was, and what the draft of this frame was copied from. */
  kinds(frame) {
    const kinds = new Map();
    for (const f of this.frames.slice(0, this.index)) {
      const drafted = f.put_out - (f.drawn ? 1 : 0);
      for (let i = 0; i < f.put_out; i++) kinds.set(f.known + i, i < drafted ? "drafted" : "drawn");
    }
    if (frame.match) {
      const { start, length, copied } = frame.match;
      for (let i = 0; i < length; i++) kinds.set(start + i, "match"), kinds.set(frame.known - length + i, "match");
      for (let i = 0; i < copied; i++) if (start + length + i < frame.known - length) kinds.set(start + length + i, "copied");
    }
    return kinds;
  }

  drawText(frame) {
    const [tokens, prompt] = [this.get("tokens"), this.get("num_prompt")];
    const kinds = this.kinds(frame);
    const source = frame.match ? frame.match.start : frame.known;
    const from = Math.max(0, Math.min(source - 20, frame.known - 60), frame.known - MAX_CHIPS);
    const chip = (i, kind) => h("span", { "data-kind": kind, title: `id ${tokens[i][0]}, position ${i}` }, [tokens[i][1].replaceAll("\n", "↵\n")]);
    const chips = [];
    for (let i = from; i < Math.min(frame.known, tokens.length); i++) chips.push(chip(i, kinds.get(i) ?? (i < prompt ? "prompt" : "drawn")));
    const stood = frame.draft.filter((token) => token.fate === "accepted");
    for (const token of stood) chips.push(h("b", { "data-kind": "drafted" }, [token.text.replaceAll("\n", "↵\n")]));
    if (frame.drawn) chips.push(h("b", { "data-kind": "drawn" }, [frame.drawn.text.replaceAll("\n", "↵\n")]));
    clear(this.chips, from ? h("span.pd-muted", {}, [`… ${from} tokens before `]) : null, ...chips);
  }

  scrollToEnd() {
    this.chips.scrollTop = this.chips.scrollHeight;
  }

  drawRows(frame) {
    const rules = {
      greedy: "greedy: a token stands if the model would have taken it, its most probable one",
      chosen: "the draft was chosen, not drawn: a token stands if the model draws it, which it does with p",
      drawn: "the draft was drawn from q: a token stands with min(1, p/q)",
    };
    this.ruleHint.textContent = frame.draft.length ? rules[frame.rule] : "";
    const head = ["", "token", "", "q", "p", frame.rule === "drawn" ? "stands with" : "", ""].map((text) => h("span.pd-sv-h", {}, [text]));
    const rows = frame.draft.flatMap((token, i) => this.row(i + 1, token, frame.rule));
    const drawn = frame.drawn ? this.drawnRow(frame) : [];
    clear(this.rows, ...head, ...rows, ...drawn);
  }

  row(place, { text, id, q, p, fate }, rule) {
    const chance = rule === "drawn" && p != null ? percentOf(Math.min(1, p / q)) : "";
    const value = (v, none) => h("span.pd-num", { "data-fate": fate }, [v == null ? none : percentOf(v)]);
    const chosen = rule === "drawn" ? "–" : "chosen";
    const label = `Place ${place}: ${text}, q ${q == null ? chosen : percentOf(q)}, p ${p == null ? "not computed" : percentOf(p)}, ${fate}`;
    return [h("span.pd-muted.pd-num", {}, [String(place)]), h("code", { "data-kind": "drafted", "data-fate": fate, title: `id ${id}` }, tokenText(text)),
      bars(q ?? 1, p, fate, label), value(q, chosen), value(p, "–"), h("span.pd-num", {}, [chance]), h("span.pd-sv-fate", { "data-fate": fate }, [FATES[fate]])];
  }

  drawnRow(frame) {
    const { text, p, kind } = frame.drawn;
    const how = kind === "resampled" && frame.rule === "drawn" ? "→ drawn in its place, from max(0, p − q)" : frame.rule === "greedy" && kind === "resampled" ? "→ taken in its place" : DRAWN[kind];
    return [h("span"), h("code", { "data-kind": "drawn" }, tokenText(text)), bars(null, p, "drawn", `The model's own: ${text}, p ${percentOf(p ?? 0)}`), h("span"),
      h("span.pd-num", {}, [p == null ? "–" : percentOf(p)]), h("span"), h("span.pd-sv-fate", { "data-fate": "drawn" }, [how])];
  }

  // ---- the whole run ----------------------------------------------------------------------

  drawPositions() {
    const run = this.told();
    const places = run.positions.slice(0, MAX_PLACES);
    if (!places.length) return clear(this.positions, h("div.pd-muted", {}, ["Nothing was drafted in this run."]));
    const label = `Acceptance by place: ${places.map(([n, k], i) => `${i + 1}: ${k} of ${n}`).join(", ")}`;
    const values = places.map(([looked, stood]) => ({ part: looked ? stood / looked : 0, text: looked ? percentShort(stood / looked) : "–", title: `${stood} of ${looked} stood` }));
    const mean = `${percentShort(run.acceptance)} of all looked at`;
    clear(this.positions, columns(values, label, "draft", { y: run.acceptance, text: mean }));
  }

  drawByTokens() {
    const run = this.told();
    const counts = run.by_tokens.slice(1, MAX_PLACES + 1);
    const most = Math.max(1, ...counts);
    this.tokensHint.textContent = `${digits(run.tokens_a_step)} on average; ${percentShort(run.share)} of the steps had a draft, of ${digits(run.mean_length)} tokens on average`;
    const label = `Tokens a step: ${counts.map((n, i) => `${i + 1}: ${n} times`).join(", ")}`;
    const values = counts.map((n, i) => ({ part: n / most, text: String(n), title: `${n} steps gave ${i + 1}`, color: i ? "draft" : "decode" }));
    clear(this.byTokens, columns(values, label, "draft"));
  }

  drawSpeedup() {
    const [run, runs, ratio] = [this.told(), this.get("runs"), this.get("cost_ratio")];
    this.ratio.value = ratio;
    this.ratioText.textContent = digits(ratio);
    this.ratioReset.disabled = Math.abs(ratio - Math.min(1, run.cost_ratio)) < 1e-9;
    const points = runs.filter((r) => r.speedup !== null && r.num_drafts);
    const longest = Math.min(32, Math.max(8, ...points.map((r) => Math.ceil(r.mean_length) + 2)));
    const lengths = Array.from({ length: longest + 1 }, (_, k) => k);
    const paper = lengths.map((k) => predictedSpeedup(run, k, ratio, 0));
    const here = lengths.map((k) => predictedSpeedup(run, k, ratio, run.check_slope));
    const most = Math.max(1.2, ...here, ...points.map((r) => r.speedup));
    const top = Math.min(2 * most, Math.max(most, ...paper)) * 1.08; // the dotted curve may leave: the others count
    clear(this.curve, speedupPlot({ lengths, paper, here, points, run, top, colors: runs.map((r) => r.name) }));
    const best = here.indexOf(Math.max(...here));
    const entry = (kind, label) => h("span", {}, [h("i.pd-sv-line", { "data-kind": kind }), label]);
    clear(this.gainLegend, entry("paper", "predicted, checking free"), run.plain_s ? entry("here", `predicted, a drafted token checked costs ${digits(run.check_slope)} of a step; best at ${best}`) : null,
      points.length ? entry("point", "measured") : h("span", {}, ["measured: there is no plain step to compare with"]));
    this.root.dataset.predicted = here.map((v) => v.toFixed(4)).join(" ");
  }

  drawFoot() {
    const run = this.told();
    const cut = this.get("num_cut");
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`${run.drafter}; ${run.num_accepted} of ${run.num_drafted} drafted tokens stood; measured on ${run.machine}${run.against ? `, against ${run.against}` : ""}`]),
      provenanceTag("predicted"), h("span", {}, ["Leviathan et al. 2023, theorem 3.8, for drafts as often and as often right as here"]),
      cut ? h("span", {}, [`${cut} later steps are not shown`]) : null);
  }
}

const percentShort = (part) => `${Math.round(100 * part)}%`;
const percentOf = (part) => (part > 0 && part < 0.001 ? "<0.1%" : part < 1 && part > 0.999 ? ">99.9%" : `${(100 * part).toFixed(1)}%`);

/** q above p: the drafter's probability of a token, and the model's. */
function bars(q, p, fate, label) {
  const bar = (kind, value) => (value == null ? null : h("i", { "data-kind": kind, style: `width:${100 * value}%` }));
  return h("div.pd-sv-bars", { role: "img", "aria-label": label, "data-fate": fate }, [bar("q", q), bar("p", p)]);
}

/** Columns from 0 to 1 with a text on each, and a line across. */
function columns(values, label, color, line = null) {
  const [width, height, left] = [360, 92, 8];
  const step = (width - left) / Math.max(values.length, 6);
  const y = (part) => 16 + (height - 34) * (1 - part);
  const parts = values.map(({ part, text, title, color: own }, i) => {
    const x = left + i * step;
    return `<g><title>${title}</title><rect x="${x + 2}" y="${y(part)}" width="${step - 4}" height="${Math.max(1, y(0) - y(part))}" rx="2" fill="var(--pd-${own ?? color})"/>` +
      `<text x="${x + step / 2}" y="${y(part) - 4}">${text}</text><text x="${x + step / 2}" y="${height - 4}" class="pd-sv-tick">${i + 1}</text></g>`;
  });
  const across = line ? `<line x1="${left}" x2="${width}" y1="${y(line.y)}" y2="${y(line.y)}"/>` : "";
  const node = h("div", { role: "img", "aria-label": label + (line ? `; ${line.text}` : "") });
  node.innerHTML = `<svg viewBox="0 0 ${width} ${height}" aria-hidden="true">${parts.join("")}${across}</svg>`;
  if (line) node.append(h("div.pd-hint", {}, [`line: ${line.text}`]));
  return node;
}

function speedupPlot({ lengths, paper, here, points, run, top, colors }) {
  const [width, height, left, bottom] = [360, 172, 30, 30];
  const longest = lengths.at(-1);
  const x = (k) => left + ((width - left - 12) * k) / longest;
  const y = (v) => 8 + (height - bottom - 8) * (1 - v / top);
  const path = (values) => values.map((v, i) => [v, `${x(lengths[i]).toFixed(1)} ${y(v).toFixed(1)}`]).filter(([v]) => v <= top).map(([, at], i) => (i ? "L" : "M") + at).join("");
  const yTicks = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16].filter((v) => v <= top && (top < 2.6 || v === Math.round(v)));
  const xTicks = lengths.filter((k) => k % (longest > 16 ? 4 : 2) === 0);
  const marks = points.map((r) => {
    const i = colors.indexOf(r.name);
    const own = r.name === run.name;
    const text = `${r.name}: measured ${digits(r.speedup)} times, drafts of ${digits(r.mean_length)}`;
    return `<circle cx="${x(r.mean_length)}" cy="${y(r.speedup)}" r="${own ? 6 : 4.5}" class="pd-sv-point" data-own="${own}" style="fill:var(--pd-run-${i})"><title>${escapeText(text)}</title></circle>`;
  });
  const node = h("div", { role: "img", "aria-label": `Speed-up by draft length: ${points.map((r) => `${r.name} measured ${digits(r.speedup)} at ${digits(r.mean_length)}`).join(", ") || "nothing measured"}; predicted ${lengths.map((k, i) => `${k}: ${digits(here[i])}`).join(", ")}` });
  node.innerHTML = `<svg viewBox="0 0 ${width} ${height}" aria-hidden="true">` +
    yTicks.map((v) => `<line x1="${left}" x2="${width}" y1="${y(v)}" y2="${y(v)}" class="${v === 1 ? "pd-sv-one" : "pd-sv-grid"}"/><text x="${left - 5}" y="${y(v) + 4}" class="pd-sv-y">${v}×</text>`).join("") +
    xTicks.map((k) => `<text x="${x(k)}" y="${height - bottom + 15}" class="pd-sv-tick">${k}</text>`).join("") +
    `<text x="${(width + left) / 2}" y="${height - 2}" class="pd-sv-tick">tokens drafted</text>` +
    `<path d="${path(paper)}" class="pd-sv-paper"/>${run.plain_s ? `<path d="${path(here)}" class="pd-sv-here"/>` : ""}${marks.join("")}</svg>`;
  return node;
}

function escapeText(text) {
  return text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

export default { render };
