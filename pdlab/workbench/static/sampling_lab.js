// The SamplingLab: a text, the chain with a control for each link, the distribution, and the draw.

const TOP_K = [0, 1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
// Links with a slider: [least, most, step, off, what is said when it applies].
const SLIDERS = {
  repetition_penalty: [0.5, 2, 0.05, 1], frequency_penalty: [-2, 2, 0.1, 0], presence_penalty: [-2, 2, 0.1, 0],
  temperature: [0, 2, 0.05, 1], top_k: [0, TOP_K.length - 1, 1, 0], top_p: [0, 1, 0.01, 1], min_p: [0, 1, 0.01, 0], typical_p: [0, 1, 0.01, 1],
};
const MEANINGS = {
  model: "softmax of the model's own logits",
  logit_bias: "added to the logits of single tokens: pick one with ± beside its bar",
  repetition_penalty: "divides positive logits of tokens in prompt or output, multiplies negative ones; 1 is off",
  frequency_penalty: "subtracted for each time a token stands in the output; 0 is off",
  presence_penalty: "subtracted once from tokens that stand in the output; 0 is off",
  bad_words: "texts that must not come, whatever tokens spell them; separated by commas",
  min_tokens: "no end before so many tokens",
  constraint: "what a grammar allows next",
  temperature: "divides the logits; 1 leaves them, 0 takes the most probable token",
  top_k: "keeps the k most probable tokens; 0 keeps all",
  top_p: "keeps the fewest most probable tokens that have p together; 1 keeps all",
  min_p: "keeps tokens with at least this part of the best one's probability; 0 keeps all",
  typical_p: "keeps tokens whose surprise is nearest to the expected one; 1 keeps all",
};
const MAX_CHIPS = 400;

function render({ model, el }) {
  const view = new SamplingView(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.destroy();
}

class SamplingView {
  constructor(model) {
    this.model = model;
    this.stageShown = null; // the stage whose distribution the bars show; null for the last
    this.asker = new Asker(model, (arrived) => (arrived ? this.drawSoon() : this.drawState()));
    this.build();
    const draw = () => this.asker.asked === null && this.drawSoon(); // else once, when the answer is complete
    this.stop = listen(model, { "change:result": () => ((this.stageShown = null), draw()), "change:counts": draw, "change:message": draw, "change:tokens": draw, "change:position": draw });
  }

  destroy() {
    this.stop();
    this.asker.stop();
  }

  get = (name) => this.model.get(name);

  drawSoon = onceSoon(() => this.draw());

  // ---- building ---------------------------------------------------------------------------

  build() {
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.state = h("span.pd-pill", { role: "status", hidden: true }, ["computing …"]);
    this.message = h("div.pd-tb-message", { role: "alert", hidden: true });
    this.root = h("div.pdlab.pd-sampling-lab", { role: "group", "aria-label": "Sampling lab" }, [
      h("div.pd-head", {}, [this.title, this.state]), this.message, this.buildText(),
      h("div.pd-sl-cols", {}, [h("div.pd-sl-left", {}, [this.buildChain(), this.buildDraw()]), this.buildBars()]), this.buildFoot(),
    ]);
    this.tip = tooltip(this.root);
  }

  buildText() {
    this.chips = h("div.pd-sl-text", { role: "group", "aria-label": "The text so far: choose a token to draw it again" });
    const button = (label, title, question) => h("button", { type: "button", title, onclick: () => this.asker.ask(question()) }, [label]);
    this.takeButton = button("Take", "Write the drawn token, and go on after it", () => ({ type: "take" }));
    this.resetButton = button("Reset text", "Back to the prompt as it was given", () => ({ type: "reset" }));
    return h("div.pd-sl-top", {}, [this.chips, h("div.pd-sl-actions", {}, [
      this.takeButton, button("Draw again", "Draw with the next seed", () => ({ type: "draw" })),
      button("Draw 1000", "Draw with the seeds 0 to 999; dots show how often each token came", () => ({ type: "many" })), this.resetButton])]);
  }

  buildChain() {
    const [node, body] = section("The chain, in its order", "choose a link for the distribution after it; bits: its entropy", "pd-sl-chain");
    const head = ["", "", "top tokens", "left", "bits", "removed"].map((text) => h("span.pd-tb-h", {}, [text]));
    head[4].title = "entropy of the distribution, in bits";
    head[5].title = "probability of the tokens that this link removed";
    this.rows = new Map(["model", ...this.get("header").links].map((name, i) => [`${i} ${name}`, this.buildLink(name, i)]));
    body.append(h("div.pd-sl-table", {}, [...head, ...[...this.rows.values()].flatMap((row) => row.cells)]));
    return node;
  }

  buildLink(name, index) {
    const label = name === "model" ? "the model" : name;
    const button = h("button.pd-sl-name", { type: "button", onclick: () => this.chooseStage(index) }, [label]);
    const control = this.control(name);
    const [strip, left, bits, removed] = [h("div.pd-sl-strip", { role: "img" }), h("span.pd-num"), h("span.pd-num"), h("span.pd-num")];
    return { name, button, control, strip, left, bits, removed, cells: [button, control.node, strip, left, bits, removed] };
  }

  control(name) {
    if (SLIDERS[name]) return this.sliderControl(name);
    if (name === "logit_bias") return this.biasControl();
    if (name === "bad_words") return this.wordsControl();
    const { min_tokens, constraint } = this.get("header");
    const text = { model: "softmax of its logits", min_tokens: min_tokens || "", constraint: constraint ?? "" }[name] ?? "the request's own";
    return { node: h("span.pd-sl-control.pd-muted", {}, [String(text)]), sync() {} };
  }

  sliderControl(name) {
    const [least, most, step] = SLIDERS[name];
    const toValue = name === "top_k" ? (i) => TOP_K[i] : (v) => v;
    const set = (value) => this.asker.ask({ type: "set", values: { [name]: value } });
    const input = h("input", { type: "range", min: least, max: most, step, "aria-label": name, oninput: () => ((box.value = toValue(+input.value)), set(toValue(+input.value))) });
    const box = h("input.pd-tb-box", { type: "text", inputmode: "decimal", size: 4, "aria-label": `${name}, exact value`, onchange: () => set(readNumber(box.value)), onkeydown: keepKeys });
    const sync = () => {
      const value = this.get(name);
      if (document.activeElement !== input) input.value = name === "top_k" ? nearest(TOP_K, value) : value;
      input.setAttribute("aria-valuetext", `${name} ${value}`);
      if (document.activeElement !== box || !this.get("message")) box.value = value;
    };
    return { node: h("span.pd-sl-control", {}, [input, box]), sync };
  }

  biasControl() {
    const select = h("select", { "aria-label": "logit_bias: token", onchange: () => ((this.biased = +select.value), sync()) });
    const input = h("input", { type: "range", min: -20, max: 20, step: 0.5, "aria-label": "logit_bias", oninput: () => this.setBias(+input.value) });
    const value = h("b.pd-num");
    const sync = () => {
      const tokens = this.get("result").tokens;
      const bias = this.get("logit_bias");
      if (!tokens.some((t) => t.id === this.biased)) this.biased = +(Object.keys(bias)[0] ?? tokens[0].id);
      clear(select, ...tokens.map((t) => h("option", { value: t.id }, [visibleText(t.text) + (bias[t.id] ? ` (${signed(bias[t.id])})` : "")])));
      select.value = this.biased;
      if (document.activeElement !== input) input.value = bias[this.biased] ?? 0;
      value.textContent = signed(bias[this.biased] ?? 0);
      input.setAttribute("aria-valuetext", value.textContent);
    };
    this.biasSelect = select;
    return { node: h("span.pd-sl-control", {}, [select, input, value]), sync };
  }

  setBias(value) {
    const bias = { ...(this.pendingBias ?? this.get("logit_bias")) };
    if (value) bias[this.biased] = value;
    else delete bias[this.biased];
    this.pendingBias = bias; // until the answer is there
    this.asker.ask({ type: "set", values: { logit_bias: bias } });
  }

  wordsControl() {
    const read = () => input.value.split(",").map((w) => w.trim()).filter(Boolean);
    const input = h("input.pd-tb-words", { type: "text", placeholder: "words, separated by commas", "aria-label": "bad_words", onchange: () => this.asker.ask({ type: "set", values: { bad_words: read() } }), onkeydown: keepKeys });
    const sync = () => document.activeElement !== input && (input.value = this.get("bad_words").join(", "));
    return { node: h("span.pd-sl-control", {}, [input]), sync };
  }

  buildBars() {
    const [node, body] = section("The next token", null, "pd-sl-next");
    this.barsHint = h("span.pd-hint");
    node.querySelector(".pd-section-title").append(this.barsHint);
    this.bars = h("div.pd-tb-bars");
    const swatch = (cls, label) => h("span", {}, [h(`i.pd-swatch.${cls}`), label]);
    this.legend = h("div.pd-legend", {}, [swatch("pd-tb-before", "the model's own"), swatch("pd-tb-after", "after the chain"), swatch("pd-tb-chosen", "drawn"), swatch("pd-tb-gone", "removed"),
      (this.dotLegend = h("span", {}, [h("i.pd-tb-dot"), h("span")]))]);
    body.append(this.bars, this.legend);
    return node;
  }

  buildDraw() {
    const [node, body] = section("The draw", null, "pd-sl-draw");
    this.drawHint = h("span.pd-hint");
    node.querySelector(".pd-section-title").append(this.drawHint);
    this.dart = h("div.pd-sl-dart", { "aria-hidden": "true" });
    this.shares = h("div.pd-sl-shares", { role: "img" });
    this.ticks = h("div.pd-sl-ticks", { "aria-hidden": "true" }, ["0", "0.25", "0.5", "0.75", "1"].map((t) => h("span", {}, [t])));
    body.append(h("div.pd-sl-throw", {}, [this.dart, this.shares]), this.ticks);
    this.drawNode = node;
    return node;
  }

  buildFoot() {
    const { model, machine } = this.get("header");
    return h("div.pd-foot", {}, [provenanceTag("measured"), h("span", {}, [`${model}: real logits, the engine's own chain and draw, on ${machine}`])]);
  }

  // ---- choosing ---------------------------------------------------------------------------

  chooseStage(index) {
    const stage = this.get("result").stages[index];
    this.stageShown = this.stageShown === index || stage.place === null ? null : index;
    this.draw();
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    const result = this.get("result");
    if (!result.stages) return;
    this.drawState();
    if (!this.asker.isBusy) this.pendingBias = null;
    this.message.textContent = this.get("message");
    this.message.hidden = !this.get("message");
    this.drawTitle(result);
    this.drawText(result);
    this.drawChain(result);
    this.drawBars(result);
    this.drawDraw(result);
    this.root.dataset.answered = this.get("answered");
  }

  /** Whether something is being computed. */
  drawState() {
    const busy = this.asker.isBusy;
    this.root.setAttribute("aria-busy", String(busy));
    clearTimeout(this.slow);
    this.state.hidden = true;
    if (busy) this.slow = setTimeout(() => (this.state.hidden = !this.asker.isBusy), 300); // a short wait needs no word
  }

  drawTitle({ stages, draw }) {
    const [first, last] = [stages[0], stages.at(-1)];
    const tokens = `${last.left.toLocaleString("en")} of ${first.left.toLocaleString("en")} tokens ${last.left === 1 ? "is" : "are"} left; `;
    const how = draw.dart === null ? "the most probable one is taken: " : `seed ${this.get("seed")} throws the dart at ${draw.dart.toFixed(3)} and hits `;
    clear(this.title, tokens, how, h("b.pd-tb-hit", {}, tokenText(draw.text)), `, ${percent(draw.chance)}`);
  }

  drawText({ draw }) {
    const [tokens, position, prompt] = ["tokens", "position", "num_prompt"].map(this.get);
    const cut = Math.max(0, tokens.length - MAX_CHIPS);
    const chips = tokens.slice(cut).map(([id, text], k) => {
      const i = cut + k;
      const kind = i === position ? "chosen" : i > position ? "later" : i < prompt ? "prompt" : "output";
      const what = i === 0 ? "the first token: nothing before it" : `token ${i}, id ${id}: choose to draw it again`;
      return h("button.pd-sl-chip", { type: "button", "data-kind": kind, title: what, disabled: i === 0, "aria-current": i === position, "data-key": i, onclick: () => this.asker.ask({ type: "rewind", position: i }) }, tokenText(text));
    });
    if (cut) chips.unshift(h("span.pd-muted", {}, [`… ${cut} tokens before`]));
    const next = h("button.pd-sl-chip", { type: "button", "data-kind": "next", title: "the drawn token: choose to take it", onclick: () => this.asker.ask({ type: "take" }) }, tokenText(draw.text));
    if (position >= tokens.length) chips.push(next);
    else chips.push(h("button.pd-sl-chip", { type: "button", "data-kind": "end", title: "to the end of the text", onclick: () => this.asker.ask({ type: "rewind", position: tokens.length }) }, ["→ end"]));
    keepFocus(this.chips, () => clear(this.chips, ...chips));
    const marked = this.chips.querySelector("[aria-current], [data-kind=next]");
    if (marked) this.chips.scrollTop = marked.offsetTop - this.chips.clientHeight + marked.offsetHeight + 6;
    clear(this.takeButton, "Take ", h("code", {}, tokenText(draw.text)));
    this.resetButton.disabled = tokens.length === prompt && position === prompt && this.get("header").prompt_length === prompt;
  }

  drawChain({ stages, tokens, draw }) {
    const best = tokens.slice(0, 6);
    let at = 0;
    [...this.rows.values()].forEach((row, i) => {
      const stage = stages[i];
      const off = stage.place === null;
      if (!off) at = stage.place;
      const shown = this.stageShown === i || (this.stageShown === null && i === lastApplied(stages));
      for (const cell of row.cells) cell.toggleAttribute("data-off", off);
      row.button.title = (MEANINGS[row.name] ?? "a processor of the request's own") + (off ? ` (${stage.why_not})` : "");
      row.button.setAttribute("aria-pressed", String(this.stageShown === i));
      for (const cell of row.cells) cell.toggleAttribute("data-shown", shown);
      row.control.sync(stage);
      row.left.textContent = off ? "" : stage.left.toLocaleString("en");
      row.bits.textContent = off ? "" : stage.entropy.toFixed(2);
      row.removed.textContent = off || i === 0 ? "" : stage.removed ? percent(stage.removed) : "–";
      if (off) return clear(row.strip, h("span.pd-muted", {}, [stage.why_not]));
      const parts = best.map((t) => h("i", { "data-drawn": t.id === draw.id, style: `width:${t.chances[at] * 100}%`, title: `${visibleText(t.text)} ${percent(t.chances[at])}` }));
      clear(row.strip, ...parts);
      row.strip.setAttribute("aria-label", best.map((t) => `${visibleText(t.text)} ${percent(t.chances[at])}`).join(", "));
    });
  }

  drawBars({ tokens, others, stages, draw }) {
    const index = this.stageShown ?? lastApplied(stages);
    const place = stages[index].place;
    const names = stages.filter((s) => s.place !== null).map((s) => s.name);
    const removed = (t) => t.removed_by !== null && t.removed_by !== undefined && names.indexOf(t.removed_by) <= place;
    this.barsHint.textContent = index === 0 ? "the model's own distribution" : `before the chain and after ${this.stageShown === null ? "it" : stages[index].name}`;
    const top = niceTop(Math.max(...tokens.map((t) => Math.max(t.chances[0], t.chances[place]))));
    const counts = this.get("counts");
    const rows = tokens.flatMap((t) => this.barRow(t, place, top, removed(t), t.id === draw.id && this.stageShown === null, counts));
    const rest = h("span.pd-tb-rest", {}, [`and ${others.num.toLocaleString("en")} others: ${percent(others.chances[0])}`,
      place ? ` → ${percent(others.chances[place])}` : "", counts.num ? `, drawn ${counts.others} times` : ""]);
    keepFocus(this.bars, () => clear(this.bars, ...scaleRow(top, "model", "after"), ...rows, rest));
    this.dotLegend.hidden = !counts.num;
    this.dotLegend.lastChild.textContent = `share of ${(counts.num ?? 0).toLocaleString("en")} real draws, seeds 0 to ${(counts.num ?? 1) - 1}`;
  }

  barRow(t, place, top, gone, drawn, counts) {
    const [own, after] = [t.chances[0], t.chances[place]];
    const num = counts.tokens?.[t.id];
    const dot = num ? h("i.pd-tb-dot", { style: `left:${Math.min(100, (num / counts.num / top) * 100)}%` }) : null;
    const bar = tokenBar({ before: own, after, gone, chosen: drawn }, top, dot);
    const title = `id ${t.id}: take this token` + (counts.num ? `; drawn ${num} times` : "");
    const label = `${visibleText(t.text)}: ${percent(own)} before, ${gone ? `removed by ${t.removed_by}` : `${percent(after)} after`}`;
    const name = h("button.pd-tb-token", { type: "button", title, "aria-label": `Take ${label}`, "data-gone": gone, "data-chosen": drawn, "data-key": t.id, onclick: () => this.asker.ask({ type: "take", id: t.id }) }, tokenText(t.text));
    const end = gone ? h("span.pd-tag", {}, [t.removed_by]) : percent(after);
    const pick = h("button.pd-sl-pick", { type: "button", title: "set this token's logit_bias", "aria-label": `logit_bias of ${visibleText(t.text)}`, "data-key": `bias ${t.id}`, onclick: () => this.pickBias(t.id) }, ["±"]);
    return [name, bar, h("span.pd-num.pd-muted", {}, [percent(own)]), h("span.pd-num", {}, [end]), pick];
  }

  pickBias(id) {
    this.biased = id;
    this.draw();
    this.biasSelect.nextSibling.focus();
  }

  drawDraw({ draw, segments }) {
    const greedy = draw.dart === null;
    this.drawHint.textContent = greedy ? "temperature 0: no draw, the most probable token is taken" : "tokens side by side, by id; only the dart's place is random";
    this.dart.hidden = greedy;
    const label = greedy ? "" : `seed ${this.get("seed")}, draw ${this.get("position") - this.get("num_prompt") < 0 ? 0 : this.get("position") - this.get("num_prompt")}: ${draw.dart.toFixed(4)}`;
    clear(this.dart, h("span", {}, [label]));
    this.dart.style.left = `${(draw.dart ?? 0) * 100}%`;
    this.dart.toggleAttribute("data-right", (draw.dart ?? 0) > 0.75);
    const narrow = !greedy && !segments.some(([id]) => id === draw.id) ? [[draw.id, draw.text, draw.low, draw.high]] : [];
    clear(this.shares, ...[...segments, ...narrow].map(([id, text, from, to]) => h("span.pd-sl-share", {
      "data-hit": id === draw.id, style: `left:${from * 100}%;width:${(to - from) * 100}%`, title: `${visibleText(text)} (id ${id}): ${from.toFixed(4)} to ${to.toFixed(4)}`,
    }, to - from > 0.02 + 0.015 * text.length ? [h("span", {}, tokenText(text))] : [])));
    this.shares.setAttribute("aria-label", greedy ? `${visibleText(draw.text)} is taken` : `The dart at ${draw.dart.toFixed(4)} hits ${visibleText(draw.text)}, which has ${draw.low.toFixed(4)} to ${draw.high.toFixed(4)}`);
  }
}

const lastApplied = (stages) => stages.reduce((last, stage, i) => (stage.place === null ? last : i), 0);
const nearest = (list, value) => (value === -1 ? 0 : list.reduce((best, v, i) => (Math.abs(v - value) < Math.abs(list[best] - value) ? i : best), 0));
const signed = (value) => (value > 0 ? `+${value}` : value < 0 ? `−${-value}` : "0");
export default { render };
