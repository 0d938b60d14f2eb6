// The Chat: messages that stream, coloured by where their K and V came from, beside what it took.

const MAX_CELLS = 160; // more blocks than this, and a cell stands for several
const FOUND = { cached: "from the prefix cache", prefill: "computed in prefill", decode: "generated" };

function render({ model, el }) {
  const view = new Chat(model);
  el.replaceChildren(view.root);
  view.draw();
  view.tell({ type: "view", open: true });
  return () => {
    view.stop();
    view.tell({ type: "view", open: false });
  };
}

class Chat {
  constructor(model) {
    this.model = model;
    this.answer = ""; // of the exchange that streams
    this.number = 0; // of the last piece
    this.stats = null;
    this.build();
    this.stop = listen(model, {
      "change:exchanges": () => this.newExchanges(),
      "change:cached_to": () => this.drawLog(),
      "change:num_forgotten": () => this.drawLog(),
      "change:busy": () => this.newBusy(),
      "change:message": () => this.newMessage(),
      "msg:custom": (content) => this.hear(content),
    });
  }

  get = (name) => this.model.get(name);

  tell(content) {
    try { this.model.send(content); } catch { /* the kernel is gone */ }
  }

  // ---- building ---------------------------------------------------------------------------

  build() {
    const { model, limit, machine } = this.get("header");
    this.state = h("span.pd-pill", { role: "status" });
    this.log = h("div.pd-chat-log", { role: "log", "aria-label": "Conversation", tabindex: 0 });
    this.message = h("div.pd-chat-message", { role: "alert", hidden: true });
    this.root = h("div.pdlab.pd-chat", { role: "group", "aria-label": `Chat with ${model}`, "data-lm-suppress-shortcuts": "true", onkeydown: (e) => this.onKey(e) }, [
      h("div.pd-head", {}, [h("div.pd-title", {}, [`Chat with ${model}`]), this.state]),
      h("div.pd-cols", {}, [
        h("div.pd-chat-talk", {}, [this.log, this.buildLegend(), this.message, this.buildComposer()]),
        h("div.pd-chat-side", {}, [this.buildMetrics(), this.buildBlocks(), this.buildTurns()]),
      ]),
      h("div.pd-foot", {}, [provenanceTag("measured"), h("span", {}, [`${limit.toLocaleString("en")} tokens fit; on ${machine}`])]),
    ]);
  }

  buildLegend() {
    const entries = Object.entries(FOUND).map(([name, meaning]) =>
      h("span", {}, [h("i.pd-swatch", { style: `background:var(--pd-${name})` }), `${name}: ${meaning}`]));
    return h("div.pd-legend", {}, entries);
  }

  buildComposer() {
    this.input = h("textarea", { rows: 2, "aria-label": "Your message", placeholder: "Say something", "data-lm-suppress-shortcuts": "true", oninput: () => this.drawButtons() });
    const button = (label, title, action) => h("button", { type: "button", title, onclick: action }, [label]);
    this.send = button("Send", "Enter; Shift+Enter begins a new line", () => this.say());
    this.halt = button("Stop", "Escape", () => this.stopAnswer());
    this.undo = button("Undo", "Take the last exchange back", () => this.tell({ type: "undo" }));
    this.reset = button("Reset", "Begin a new conversation", () => this.tell({ type: "reset" }));
    return h("div.pd-chat-composer", {}, [this.input, h("div.pd-chat-buttons", {}, [this.send, this.halt, this.undo, this.reset])]);
  }

  buildMetrics() {
    this.metrics = Object.fromEntries(["speed", "ttft", "cached", "context"].map((name) => [name, h("b")]));
    const names = { speed: "tokens/s, decode", ttft: "TTFT", cached: "prompt from cache", context: "of the context" };
    return h("div.pd-chat-metrics", { role: "group", "aria-label": "This turn" }, Object.entries(names).map(([name, label]) =>
      h("div.pd-chat-metric", {}, [this.metrics[name], h("span", {}, [label])])));
  }

  buildBlocks() {
    const { block_size, num_blocks } = this.get("header");
    const [node, body] = section("KV blocks of this conversation", `${block_size} tokens each`);
    this.cells = h("div.pd-chat-cells", { role: "img" });
    this.pool = h("div.pd-chat-pool", { "aria-hidden": "true" });
    this.blocksText = h("div.pd-chat-blocks-text");
    body.append(this.cells, this.blocksText, this.pool, h("div.pd-hint", {}, [`the pool: ${num_blocks.toLocaleString("en")} blocks`]));
    return node;
  }

  buildTurns() {
    const [node, body] = section("Turns", "prompt tokens, and the wait for the first token");
    this.turns = h("div.pd-chat-turns");
    body.append(this.turns);
    return node;
  }

  // ---- hearing ----------------------------------------------------------------------------

  /** A turn has begun or ended. */
  newExchanges() {
    this.answer = this.get("exchanges").at(-1)?.answer ?? "";
    this.number = 0;
    this.stats = this.get("exchanges").at(-1)?.stats ?? null;
    this.draw();
  }

  newBusy() {
    this.halting = false;
    if (this.get("busy") && this.asked !== undefined) {
      if (this.input.value === this.asked) this.input.value = "";
      this.asked = undefined;
    }
    this.drawState();
  }

  newMessage() {
    if (this.get("message")) {
      this.asked = undefined; // refused: what was typed is there again
      this.input.value ||= this.said ?? "";
    }
    this.drawMessage();
    this.drawState();
  }

  hear({ type, number, text, stats }) {
    if (type === "all") this.answer = text;
    else if (type !== "delta" || !this.streaming) return;
    else if (number !== this.number + 1) return this.tell({ type: "catch_up" });
    else this.answer += text;
    this.number = number;
    this.stats = stats;
    this.said = undefined;
    if (type === "all" || number === 1) this.drawLog();
    else this.grow(text);
    this.drawSide();
    this.drawState();
  }

  get streaming() {
    const last = this.get("exchanges").at(-1);
    return last !== undefined && last.stats === null;
  }

  // ---- asking -----------------------------------------------------------------------------

  say() {
    const text = this.input.value;
    if (!text.trim() || this.get("busy") || this.asked !== undefined) return;
    this.asked = this.said = text;
    this.tell({ type: "say", text });
    this.drawState();
  }

  stopAnswer() {
    if (!this.get("busy")) return;
    this.halting = true;
    this.tell({ type: "stop" });
    this.drawState();
  }

  onKey(event) {
    if (event.isComposing) return; // an input method takes Enter and Escape itself
    const enter = event.key === "Enter" && event.target === this.input;
    if (event.key === "Escape") this.stopAnswer();
    else if (enter && event.shiftKey) this.newLine(); // JupyterLab would keep the browser from it
    else if (enter) this.say();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  newLine() {
    this.input.setRangeText("\n", this.input.selectionStart, this.input.selectionEnd, "end");
    this.drawButtons();
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    if (!this.streaming) this.stats = this.get("exchanges").at(-1)?.stats ?? null;
    this.drawLog();
    this.drawSide();
    this.drawMessage();
    this.drawState();
  }

  drawMessage() {
    const text = this.get("message");
    this.message.textContent = text;
    this.message.hidden = !text;
  }

  drawState() {
    const busy = this.get("busy") || this.asked !== undefined;
    const phase = !busy ? "ready" : this.halting ? "stopping" : this.streaming && this.stats?.answer_tokens ? "decode" : "prefill";
    this.state.textContent = phase;
    const known = phase === "prefill" || phase === "decode";
    this.state.style.background = known ? `var(--pd-${phase})` : "";
    this.state.style.color = known ? `var(--pd-on-${phase})` : "";
    this.root.setAttribute("aria-busy", busy);
    this.root.dataset.turns = this.get("num_hidden") + this.get("exchanges").length;
    this.drawButtons();
  }

  drawButtons() {
    const busy = this.get("busy") || this.asked !== undefined;
    this.send.disabled = busy || !this.input.value.trim();
    this.halt.disabled = !this.get("busy") || this.halting;
    this.undo.disabled = this.reset.disabled = busy || !this.get("exchanges").length;
  }

  drawLog() {
    const atEnd = this.isAtEnd();
    const { system } = this.get("header");
    const hidden = this.get("num_hidden");
    const rows = [];
    if (system) rows.push(this.row("system", this.parts(system, -1)));
    if (hidden) rows.push(h("div.pd-chat-gap", {}, [`${hidden} earlier turns are not shown`]));
    this.get("exchanges").forEach((exchange, i) => rows.push(...this.exchange(exchange, hidden + i)));
    if (!rows.length) rows.push(h("div.pd-chat-gap", {}, ["Nothing said yet. The second turn shows what the prefix cache is for."]));
    clear(this.log, ...rows);
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  /** The two messages of an exchange; `number` counts from the beginning of the conversation. */
  exchange({ user, answer, stats }, number) {
    const forgotten = number < this.get("num_forgotten");
    const isLast = number === this.get("num_hidden") + this.get("exchanges").length - 1;
    const message = 2 * (number - this.get("num_forgotten"));
    const state = (position, text) => (forgotten ? [this.part("forgotten", text)] : this.parts(text, position));
    const rows = [this.row("user", state(message, user), forgotten)];
    if (!isLast) return [...rows, this.row("model", state(message + 1, answer), forgotten)];
    const spoken = this.part("decode", stats === null ? this.answer : answer);
    if (stats === null) this.tail = spoken;
    rows.push(this.row("model", [spoken, stats === null ? h("span.pd-chat-caret", { "aria-hidden": "true" }) : null]));
    if (stats?.forgotten) rows.unshift(h("div.pd-chat-gap", {}, [`forgotten, because the conversation no longer fitted: the oldest ${stats.forgotten === 1 ? "exchange" : `${stats.forgotten} exchanges`}`]));
    if (stats?.reason === "abort") rows.push(h("div.pd-chat-gap", {}, ["stopped"]));
    if (stats?.reason === "length") rows.push(h("div.pd-chat-gap", {}, ["cut off: max_tokens, or the end of the context"]));
    return rows;
  }

  row(who, parts, forgotten) {
    const note = forgotten ? " (forgotten: the model no longer sees it)" : "";
    return h(`div.pd-chat-row.pd-chat-${who}`, { title: forgotten ? "forgotten: the model no longer sees it" : null }, [
      h("span.pd-chat-who", {}, [who === "user" ? "you" : who, note ? h("span.pd-visually-hidden", {}, [note]) : null]),
      h("div.pd-chat-text", {}, parts),
    ]);
  }

  /** A message of the prompt in one part, or in two where the cached tokens end inside it. */
  parts(text, position) {
    const [message, count] = this.get("cached_to");
    if (message === undefined) return [this.part("waiting", text)];
    if (position !== message) return [this.part(position < message ? "cached" : "prefill", text)];
    const characters = [...text]; // as Python counts them
    const halves = [["cached", characters.slice(0, count)], ["prefill", characters.slice(count)]];
    return halves.filter(([, some]) => some.length).map(([state, some]) => this.part(state, some.join("")));
  }

  part(state, text) {
    return h("span.pd-chat-part", { "data-state": state, title: FOUND[state] ?? null }, [text]);
  }

  grow(text) {
    const atEnd = this.isAtEnd();
    this.tail?.append(text);
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 30;
  }

  drawSide() {
    this.drawMetrics();
    this.drawBlocks();
    this.drawTurns();
  }

  drawMetrics() {
    const stats = this.stats;
    const { limit } = this.get("header");
    this.metrics.speed.textContent = stats?.tokens_per_s == null ? "–" : digits(stats.tokens_per_s);
    this.metrics.ttft.textContent = duration(stats?.ttft_s);
    this.metrics.cached.textContent = stats?.cached == null ? "–" : `${stats.cached} / ${stats.prompt}`;
    const context = stats ? stats.prompt + stats.answer_tokens : 0;
    this.metrics.context.textContent = stats ? `${digits((100 * context) / limit)}%` : "–";
  }

  drawBlocks() {
    const { num_blocks, block_bytes } = this.get("header");
    const { blocks = [0, 0, 0], kept_blocks = 0, reason } = this.stats ?? {};
    const over = reason != null;
    const groups = over ? [["kept", kept_blocks]] : ["cached", "prefill", "decode"].map((name, i) => [name, blocks[i]]);
    const total = groups.reduce((sum, [, count]) => sum + count, 0);
    const scale = Math.max(1, Math.ceil(total / MAX_CELLS));
    clear(this.cells, ...groups.flatMap(([name, count]) =>
      Array.from({ length: Math.ceil(count / scale) }, () => h("i", { "data-kind": name }))));
    const text = over
      ? `${kept_blocks} kept in the prefix cache, held by nobody`
      : total ? `${total} in use: ${blocks[0]} cached, ${blocks[1] + blocks[2]} of this turn` : "none yet";
    const bytes = total ? `, ${quantity(total * block_bytes, "B")}` : "";
    this.blocksText.textContent = text + bytes + (scale > 1 ? `; a cell is ${scale} blocks` : "");
    this.cells.setAttribute("aria-label", this.blocksText.textContent);
    clear(this.pool, ...groups.map(([name, count]) => h("i", { "data-kind": name, style: `width:${(100 * count) / num_blocks}%` })));
  }

  drawTurns() {
    const hidden = this.get("num_hidden");
    const all = this.get("exchanges").map(({ stats }, i) => ({ number: hidden + i + 1, stats: stats ?? this.stats }));
    const shown = all.filter(({ stats }) => stats?.cached != null).slice(-8);
    const most = Math.max(1, ...shown.map(({ stats }) => stats.prompt));
    const bar = (kind, count) => h("i", { "data-kind": kind, style: `width:${(100 * count) / most}%` });
    const head = ["", "", "cached + new", "TTFT"].map((text) => h("span.pd-muted", {}, [text]));
    clear(this.turns, ...(shown.length ? head : [h("span.pd-muted.pd-chat-none", {}, ["none yet"])]), ...shown.flatMap(({ number, stats }) => [
      h("span.pd-num", {}, [`${number}`]),
      h("div.pd-chat-turn-bar", { "aria-hidden": "true" }, [bar("cached", stats.cached), bar("prefill", stats.prompt - stats.cached)]),
      h("span.pd-num", { title: stats.forgotten ? `the oldest ${stats.forgotten} exchanges were forgotten before this turn` : null }, [
        `${stats.forgotten ? "✂ " : ""}${stats.cached} + ${stats.prompt - stats.cached}`]),
      h("span.pd-num", {}, [duration(stats.ttft_s)]),
    ]));
  }
}

export default { render };
