// StreamView: tokens come in, bytes wait until they are text, text goes out. Rows come from stream_data.py.

const TIME_HEIGHT = 64;

function render({ model, el }) {
  const view = new StreamView(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class StreamView {
  constructor(model) {
    this.model = model;
    this.build();
    this.stop = listen(model, {
      "change:rows": () => this.reload(),
      "change:step": () => this.model.get("step") !== this.index && this.show(this.model.get("step")),
    });
    this.stopAppearance = onAppearance(this.root, () => (this.drawTimes(), this.markTimes(), this.scrollToNewest()));
  }

  destroy() {
    this.transport.pause();
    this.stop();
    this.stopAppearance();
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.pill = h("span.pd-pill.pd-num");
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.note = h("div.pd-note");
    this.select = this.sequenceSelect();
    this.transport = new Transport({ go: (index) => this.go(index) });
    this.root = h("div.pdlab.pd-stream", { role: "group", "aria-label": "StreamView", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.pill, this.title, this.select]),
      this.note,
      this.transport.node,
      this.timeSection(),
      h("div.pd-cols", {}, [this.tableSection(), h("div.pd-sv-side", {}, this.sideColumn())]),
      (this.foot = h("div.pd-foot")),
    ]);
    this.tip = tooltip(this.root);
  }

  sequenceSelect() {
    const sequences = this.model.get("header").sequences;
    if (sequences.length < 2) return null;
    const choose = () => (this.transport.pause(), this.push({ sequence_id: select.value }));
    const select = h("select", { "aria-label": "Sequence", onchange: choose },
      sequences.map((id) => h("option", { value: id }, [`sequence ${id}`])));
    return select;
  }

  timeSection() {
    const [node, body] = section("Times", "above: when a token came; below: when the reader got text", "pd-sv-times");
    this.times = h("div.pd-sv-axis", { role: "img", onclick: (e) => this.pick(e), onpointermove: (e) => this.hover(e), onpointerleave: () => this.tip.hide() });
    body.append(this.times);
    this.timesNode = node;
    return node;
  }

  tableSection() {
    const [node, body] = section("Tokens, their bytes, and what became of them", "", "pd-sv-main");
    this.table = h("div.pd-sv-table", { role: "table", "aria-label": "A row a token" });
    body.append(this.table, h("div.pd-legend.pd-sv-legend", {}, [
      h("span", {}, [h("i.pd-sv-byte", { "data-role": "ascii" }, ["41"]), "a character of one byte"]),
      h("span", {}, [h("i.pd-sv-byte", { "data-role": "lead" }, ["F0"]), "lead byte"]),
      h("span", {}, [h("i.pd-sv-byte", { "data-role": "more" }, ["9F"]), "continuation byte"]),
      h("span", {}, ["bracket: a character split over tokens"]),
    ]));
    return node;
  }

  sideColumn() {
    const [reader, readerBody] = section("What the reader sees");
    this.text = h("div.pd-sv-text", { role: "log", "aria-label": "Text sent so far" });
    readerBody.append(this.text, h("div.pd-legend", {}, [
      h("span", {}, [h("i.pd-swatch", { style: "background:color-mix(in srgb, var(--pd-decode) 30%, transparent)" }), "just sent"]),
      h("span", {}, [h("i.pd-swatch.pd-sv-held"), "held back, not sent"]),
      h("span", {}, [h("del.pd-sv-cut", {}, ["cut"]), "never sent"]),
    ]));
    const [held, heldBody] = section("Held back", "and why");
    this.held = h("div.pd-sv-why");
    heldBody.append(this.held);
    return [reader, held];
  }

  // ---- moving -----------------------------------------------------------------------------

  /** Take the rows anew: another sequence. */
  reload() {
    this.rows = this.model.get("rows");
    if (this.select) this.select.value = this.model.get("sequence_id");
    const most = Math.max(1, ...this.rows.map((r) => r.released.length));
    const bars = this.rows.map((r) => ({ height: r.released.length / most, color: r.released ? "decode" : "waiting" }));
    this.transport.setBars([{ height: 0, color: "waiting" }, ...bars], `bar: characters sent with each token, at most ${most}; grey: none`);
    this.drawTable();
    this.drawTimes();
    this.drawFoot();
    this.show(this.model.get("step"));
  }

  go(index) {
    this.show(index);
    if (this.model.get("step") !== this.index) this.push({ step: this.index });
  }

  push(values) {
    for (const [key, value] of Object.entries(values)) this.model.set(key, value);
    this.model.save_changes();
  }

  show(index) {
    this.index = this.transport.clip(index);
    const row = this.rows[this.index - 1];
    this.drawHead(row);
    this.lines.forEach((line, i) => line.setAttribute("data-when", i + 1 < this.index ? "past" : i + 1 === this.index ? "now" : "future"));
    this.drawText(row);
    this.drawHeld(row);
    this.markTimes();
    this.scrollToNewest();
    this.root.dataset.step = this.index;
  }

  // ---- drawing ----------------------------------------------------------------------------

  drawHead(row) {
    const state = !row ? "start" : row.finish_reason ? "end" : row.reasons.length ? "waits" : "sent";
    this.pill.textContent = state;
    this.pill.dataset.state = state;
    this.title.textContent = row?.title ?? "No token has come yet";
    const wait = this.rows[0]?.time_s == null ? "" : ` The first one takes ${duration(this.rows[0].time_s)} (TTFT).`;
    this.note.textContent = row?.note ?? `The reader has got nothing.${wait}`;
    const where = row?.step == null ? "" : ` · engine step ${row.step}`;
    this.transport.show(this.index, `token ${this.index} of ${this.rows.length}${where}`, this.title.textContent);
  }

  drawTable() {
    const head = h("div.pd-sv-row.pd-sv-headrow", { role: "row" },
      ["", "token", "", "bytes (hex)", "held back", "sent"].map((name) => h("span", { role: "columnheader" }, [name])));
    this.lines = this.rows.map((row, i) => this.line(row, i));
    clear(this.table, head, ...this.lines);
  }

  line(row, i) {
    const cells = [
      h("span.pd-num.pd-muted", {}, [String(i + 1)]),
      h("span.pd-num", { title: row.name }, [String(row.token_id)]),
      h("span.pd-sv-bracket", {}, [bracket(row, this.rows[i - 1])]),
      h("span.pd-sv-bytes", {}, row.skipped ? [h("span.pd-muted", {}, [`${row.name} · special, no text`])] : row.parts.map(characterPart)),
      h("span.pd-sv-wait", {}, heldParts(row)),
      h("span.pd-sv-out", {}, [row.released ? h("code.pd-sv-sent", {}, [visible(row.released)]) : null, ...cutParts(row)]),
    ];
    cells.forEach((cell) => cell.setAttribute("role", "cell"));
    return h("div.pd-sv-row", { role: "row", onclick: () => this.go(i + 1) }, cells);
  }

  drawText(row) {
    const before = this.rows.slice(0, Math.max(0, this.index - 1)).map((r) => r.released).join("");
    const empty = !before && !row?.released && !row?.held_text && !row?.cut;
    clear(this.text,
      h("span", {}, [before]),
      row?.released ? h("span.pd-new", {}, [row.released]) : null,
      ...(row ? heldParts(row) : []),
      ...(row ? cutParts(row) : []),
      empty && !row?.held_bytes.length ? h("span.pd-muted", {}, ["nothing yet"]) : null);
  }

  drawHeld(row) {
    if (!row?.reasons.length) {
      const words = row?.finish_reason ? "Nothing: the stream is over." : "Nothing.";
      return clear(this.held, h("div.pd-muted", {}, [words]));
    }
    const what = [row.held_text ? h("code.pd-sv-held", {}, [visible(row.held_text)]) : null,
      row.held_bytes.length ? h("span.pd-sv-bytes", {}, [characterBox(row.held_bytes, { open: true })]) : null].filter(Boolean);
    return clear(this.held, ...row.reasons.map((reason, i) => h("div.pd-sv-reason", {}, [what[i] ?? null, h("span", {}, [reason])])));
  }

  drawFoot() {
    const { machine, provenance, by_hand: byHand, stop, include_stop: include, cut } = this.model.get("header");
    const stops = stop.length ? `stop strings ${stop.map((s) => JSON.stringify(s)).join(", ")}${include ? ", kept in the text" : ""}` : "no stop strings";
    clear(this.foot, provenanceTag(provenance),
      h("span", {}, [byHand ? "bytes and text by the engine's own detokenizer and stop search; there are no times" : `tokens, text and times recorded on ${machine}`]),
      h("span", {}, [stops]),
      cut ? h("span", {}, [`the last ${cut} tokens are not shown`]) : null);
  }

  scrollToNewest() {
    const line = this.lines[Math.max(0, this.index - 1)];
    if (line) this.table.scrollTop = Math.max(0, line.offsetTop - this.table.clientHeight / 2);
    this.text.scrollTop = this.text.scrollHeight;
  }

  // ---- times ------------------------------------------------------------------------------

  drawTimes() {
    this.timesNode.hidden = this.rows[0]?.time_s == null;
    const width = this.times.clientWidth;
    if (this.timesNode.hidden || !width) return;
    const end = this.rows.at(-1).time_s;
    this.at = (time) => (time / end) * (width - 2) + 1;
    const first = this.rows[0].time_s;
    const bars = this.rows.map((row, i) => this.timeBar(row, i)).join("");
    const gaps = this.rows.slice(1).map((r) => r.gap_s);
    const mean = gaps.length ? gaps.reduce((a, b) => a + b, 0) / gaps.length : null;
    const room = this.at(first) > 110;
    const label = room ? `<text x="${this.at(first) / 2}" y="17" class="pd-sv-on" text-anchor="middle">TTFT ${duration(first)}</text>` : "";
    this.times.innerHTML = `<svg width="${width}" height="${TIME_HEIGHT}" aria-hidden="true">${bars}${label}${this.timeTicks(end, width)}<path class="pd-sv-hand"/></svg>`;
    const itl = mean == null ? "" : `, then a token every ${duration(mean)} in the mean (ITL ${duration(Math.min(...gaps))} to ${duration(Math.max(...gaps))})`;
    this.times.setAttribute("aria-label", `First token after ${duration(first)}${itl}`);
    this.timesNode.querySelector(".pd-hint").textContent = `TTFT ${duration(first)}${itl}`;
  }

  timeBar(row, i) {
    const [from, to] = [this.at(row.time_s - row.gap_s), this.at(row.time_s)];
    const color = i ? "decode" : "prefill";
    const wait = `<rect class="pd-sv-gap" data-i="${i}" x="${from}" y="2" width="${Math.max(0.5, to - from - 1)}" height="22" fill="var(--pd-${color})"/>`;
    const mark = row.released
      ? `<circle cx="${to}" cy="34" r="4" fill="var(--pd-decode)"/>`
      : `<circle cx="${to}" cy="34" r="3.4" fill="var(--pd-surface)" stroke="var(--pd-muted)" stroke-width="1.4" stroke-dasharray="2 1.4"/>`;
    return wait + mark;
  }

  timeTicks(end, width) {
    const step = niceTime(end / Math.max(2, Math.floor(width / 110)));
    let ticks = "";
    for (let t = 0; t <= end * 1.0001; t += step) {
      const x = this.at(t);
      const anchor = x < 20 ? "start" : x > width - 30 ? "end" : "middle";
      ticks += `<path d="M${x} 43v4" stroke="var(--pd-muted)"/><text x="${x}" y="60" text-anchor="${anchor}">${t ? duration(t) : "arrival"}</text>`;
    }
    return `<path d="M0 43h${width}" stroke="var(--pd-grid)"/>${ticks}`;
  }

  markTimes() {
    const hand = this.times.querySelector(".pd-sv-hand");
    if (!hand) return;
    this.times.querySelectorAll(".pd-sv-gap").forEach((bar, i) => bar.toggleAttribute("data-past", i < this.index));
    const time = this.index ? this.rows[this.index - 1].time_s : 0;
    hand.setAttribute("d", `M${this.at(time)} 0V44`);
  }

  rowAt(event) {
    const x = event.clientX - this.times.getBoundingClientRect().left;
    const i = this.rows.findIndex((row) => this.at(row.time_s) >= x);
    return i < 0 ? this.rows.length - 1 : i;
  }

  pick(event) {
    this.go(this.rowAt(event) + 1);
  }

  hover(event) {
    const i = this.rowAt(event);
    const row = this.rows[i];
    const name = i ? "ITL" : "TTFT";
    this.tip.show(event, [`token ${i + 1}: ${row.name.replaceAll("\n", "↵")}`, `${name} ${duration(row.gap_s)}, at ${duration(row.time_s)}`,
      row.released ? `sent: ${visible(row.released)}` : "nothing sent"]);
  }
}

/** The bytes that one token brings of one character; open on the side where the character goes on. */
function characterPart(part) {
  const end = part.before + part.bytes.length;
  const alone = part.size === 1;
  const bad = part.text && (end < part.size || (alone && part.bytes[0] > 0x7f));
  const label = bad ? "no character: �" : part.text;
  const title = alone ? label : `bytes ${part.before + 1} to ${end} of ${part.size}${part.text ? `: ${label}` : ""}`;
  return characterBox(part.bytes, { before: part.before, joined: part.before > 0, open: !part.text, bad, alone, title, text: part.text });
}

function characterBox(bytes, { before = 0, joined = false, open = false, bad = false, alone = false, title = "", text = "" }) {
  const role = (i) => (bad ? "bad" : alone ? "ascii" : before + i === 0 ? "lead" : "more");
  const cells = bytes.map((byte, i) => h("i.pd-sv-byte", { "data-role": role(i) }, [byte.toString(16).toUpperCase().padStart(2, "0")]));
  const name = text && !alone ? h("b", {}, [visible(text)]) : alone && !bad ? h("small", {}, [visible(text)]) : null;
  return h("span.pd-sv-char", { title, "data-joined": joined, "data-open": open, "data-alone": alone }, [...cells, name]);
}

/** The bracket that joins the rows of one character: its upper and its lower half in this row. */
function bracket(row, before) {
  const [above, below] = [Boolean(before?.open), row.open];
  if (!above && !below) return "";
  const goesOn = below && row.parts.length === 1 && row.parts[0].before > 0;
  const ends = above && !goesOn && row.parts.some((part) => part.before > 0 && part.text);
  const broken = above && row.parts.length && row.parts[0].before === 0; // never finished: what came is no continuation
  const begins = below && row.parts.length && row.parts.at(-1).before === 0;
  const half = (kind, tick) => h("i", { "data-half": kind, "data-tick": tick });
  return h("span", {}, [above ? half("upper", ends || broken) : null, below ? half("lower", begins) : null]);
}

function heldParts(row) {
  return [row.held_text ? h("code.pd-sv-held", { title: row.reasons[0] }, [visible(row.held_text)]) : null,
    row.held_bytes.length ? h("span.pd-sv-held.pd-sv-heldbytes", { title: row.reasons.at(-1) }, [row.held_bytes.map((b) => b.toString(16).toUpperCase().padStart(2, "0")).join(" ")]) : null].filter(Boolean);
}

/** What the end cut off: the stop string, and what the last token held after it. */
function cutParts(row) {
  if (!row.cut) return [];
  const stop = row.cut.startsWith(row.stop) ? row.stop : "";
  const rest = row.cut.slice(stop.length);
  return [stop ? h("del.pd-sv-cut", { title: "the stop string" }, [visible(stop)]) : null,
    rest ? h("del.pd-sv-cut", { title: "after the end", "data-rest": true }, [visible(rest)]) : null].filter(Boolean);
}

/** Text with its spaces and line breaks made visible, and characters that show nothing named: U+200D. */
function visible(text) {
  const named = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\uFE00-\uFE0F]/gu, named);
}

/** 1, 2 or 5 times a power of ten, at least so long. */
function niceTime(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((t) => t >= least);
}

export default { render };
