// The LiveCluster: a card for each process with a button to kill it, the answers that are written, the
// pace of tokens, and what happened. Python sends a picture a few times a second.

const SAID = {
  "not started": "not started", starting: "processes are starting", running: "serving",
  stopping: "ending", stopped: "stopped", failed: "failed",
};

function render({ model, el }) {
  const view = new LiveCluster(model);
  el.replaceChildren(view.root);
  view.draw();
  view.tell({ type: "view", open: true });
  return () => {
    view.stop();
    view.tell({ type: "view", open: false });
  };
}

class LiveCluster {
  constructor(model) {
    this.model = model;
    this.cards = new Map();
    this.rows = [];
    this.build();
    const draw = onceSoon(() => this.draw());
    this.stop = listen(model, { "change:picture": draw, "change:state": draw, "change:message": draw });
  }

  get = (name) => this.model.get(name);

  tell(content) {
    try { this.model.send(content); } catch { /* the kernel is gone */ }
  }

  // ---- building ---------------------------------------------------------------------------

  build() {
    const { roles, model } = this.get("header");
    const button = (label, title, wish) => h("button", { type: "button", title, onclick: () => this.tell({ type: wish }) }, [label]);
    this.state = h("span.pd-pill", { role: "status" });
    this.begin = button("Start", "Start the processes: some seconds", "start");
    this.begin.classList.add("pd-lc-start");
    this.document = button("Paste a long document", "600 tokens to be read, of which a few words are to be written", "paste");
    this.end = button("Stop", "End all processes", "stop");
    this.message = h("div.pd-lc-message", { role: "alert", hidden: true });
    this.recorded = h("div.pd-lc-recorded", { hidden: true });
    this.board = h("div.pd-lc-cards", { role: "group", "aria-label": "Workers" });
    this.table = h("div.pd-lc-rows", { role: "group", "aria-label": "Answers" });
    this.pace = h("div.pd-lc-pace", { role: "img" });
    this.log = h("div.pd-lc-log", { role: "log", "aria-label": "What happened" });
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-live-cluster", { role: "group", "aria-label": "Live cluster" }, [
      h("div.pd-head", {}, [
        h("div.pd-title", { title: roles }, [h("b", {}, ["Live cluster"]), `: ${model}`]),
        h("div.pd-lc-bar", {}, [this.begin, this.document, this.end]),
        this.state,
      ]),
      this.message, this.recorded, this.board, this.table,
      h("div.pd-lc-below", {}, [this.log, this.pace]),
      this.foot,
    ]);
  }

  buildCard(name) {
    const card = { name };
    for (const part of ["role", "pid", "jobs", "step", "kv"]) card[part] = h("span.pd-num");
    card.jobs.classList.add("pd-lc-jobs");
    card.fill = h("i");
    card.button = h("button", { type: "button", onclick: () => this.tell({ type: card.wish, name }) });
    card.node = h("div.pd-lc-card", { "data-worker": name }, [
      h("div.pd-lc-name", {}, [h("b", {}, [name]), card.role, card.jobs]),
      h("div", {}, [card.step]),
      h("div.pd-lc-kv", {}, [card.kv, h("span.pd-lc-fill", { "aria-hidden": "true" }, [card.fill])]),
      h("div.pd-lc-act", {}, [card.button, card.pid]),
    ]);
    return card;
  }

  buildRow() {
    const row = { who: h("div.pd-lc-who"), text: h("div.pd-lc-text"), state: h("div.pd-lc-state"), bar: h("i.pd-lc-part") };
    row.node = h("div.pd-lc-row", {}, [row.who, row.text, row.state, row.bar]);
    return row;
  }

  // ---- drawing ----------------------------------------------------------------------------

  draw() {
    const picture = this.get("picture");
    const state = this.get("state");
    this.isLive = !("recorded" in picture);
    this.drawState(state, picture);
    if (!picture.workers) return;
    this.drawCards(picture.workers, state);
    this.drawRows(picture.rows);
    this.drawPace(picture);
    this.drawLog(picture.log);
    this.drawFoot(picture);
    this.root.dataset.state = state;
    this.root.dataset.alive = picture.workers.filter((w) => w.state === "serving").length;
    this.root.dataset.answers = picture.answers;
  }

  drawState(state, picture) {
    const alive = (picture.workers ?? []).filter((w) => w.state === "serving").length;
    const all = picture.workers?.length ?? 0;
    const starting = this.isLive && state === "starting" ? ` (${all - picture.workers.filter((w) => w.state === "starting").length} of ${all})` : "";
    this.state.textContent = state === "running" ? `${alive} of ${all} workers serve` : SAID[state] + starting;
    this.state.dataset.whole = state !== "running" || alive === all;
    const runs = ["starting", "running", "stopping"].includes(state);
    this.begin.disabled = runs;
    this.begin.textContent = ["stopped", "failed"].includes(state) ? "Start again" : "Start";
    this.document.disabled = state !== "running" || !alive;
    this.end.disabled = !["starting", "running"].includes(state);
    this.message.textContent = this.get("message");
    this.message.hidden = !this.get("message");
    this.recorded.hidden = this.isLive;
    if (!this.isLive) clear(this.recorded, provenanceTag("recorded"), h("span", {}, [`After a kill, on ${picture.recorded}. Press Start to see it here, live.`]));
  }

  drawCards(workers, state) {
    for (const worker of workers) {
      if (!this.cards.has(worker.name)) {
        const card = this.buildCard(worker.name);
        this.cards.set(worker.name, card);
        this.board.append(card.node);
      }
      this.drawCard(this.cards.get(worker.name), worker, state);
    }
    for (const [name, card] of this.cards) {
      if (workers.some((worker) => worker.name === name)) continue;
      card.node.remove();
      this.cards.delete(name);
    }
  }

  drawCard(card, worker, state) {
    const serves = worker.state === "serving";
    card.node.dataset.role = worker.role;
    card.node.dataset.state = worker.state;
    card.role.textContent = { serving: worker.role, lost: "✗ lost", starting: "starting …", ended: "ended" }[worker.state];
    card.jobs.textContent = serves ? `${worker.jobs} ${worker.jobs === 1 ? "request" : "requests"}` : "";
    card.step.textContent = serves ? stepInWords(worker) : "–";
    card.kv.textContent = serves ? `KV memory ${Math.round(100 * worker.fill)}%` : "KV memory –";
    card.fill.style.width = `${Math.min(100, Math.max(0, 100 * worker.fill))}%`;
    card.pid.textContent = worker.pid && this.isLive ? `process ${worker.pid}` : "";
    const dead = ["lost", "ended"].includes(worker.state);
    card.wish = dead ? "revive" : "kill";
    card.button.textContent = dead ? `start ${worker.name} anew` : `kill -9 ${worker.name}`;
    card.button.dataset.wish = card.wish;
    card.button.disabled = state !== "running" || !this.isLive;
  }

  drawRows(rows) {
    while (this.rows.length < rows.length) {
      this.rows.push(this.buildRow());
      this.table.append(this.rows.at(-1).node);
    }
    while (this.rows.length > rows.length) this.rows.pop().node.remove();
    rows.forEach((row, i) => this.drawRow(this.rows[i], row));
  }

  drawRow(view, row) {
    view.node.style.setProperty("--pd-lc-color", `var(--pd-seq-${row.color % 8})`);
    view.node.dataset.stage = row.stage;
    view.node.dataset.attempt = row.attempt ?? 0;
    clear(view.who, h("b", {}, [row.reader]), h("span.pd-muted", {}, [row.request ?? "", row.attempt ? h("b.pd-lc-again", {}, [`, attempt ${row.attempt + 1}`]) : ""]));
    if (row.stage === "thinking") {
      clear(view.text);
      clear(view.state);
      view.bar.style.width = "0";
      return;
    }
    const parts = [h("i.pd-lc-prompt", {}, [row.prompt]), row.is_shortened ? " … " : row.prompt.startsWith("[") ? " " : ""];
    row.pieces.forEach((piece, i) => {
      if (i) parts.push(h("span.pd-lc-cut", { title: "here a worker was lost; what follows was written by another one" }, [`${row.lost[i - 1] || "a worker"} lost`]));
      parts.push(h("span", { "data-again": i > 0 || row.lost.length < row.attempt }, [piece.replaceAll("\n", " ")]));
    });
    clear(view.text, ...parts);
    clear(view.state, h("div", {}, whereInWords(row)), h("div.pd-lc-note.pd-num", {}, [
      `${row.tokens} of ${row.most}`,
      row.stalled_s ? h("b.pd-lc-stalled", {}, [`, ${row.tokens ? "none for" : "waits"} ${row.stalled_s.toFixed(1)} s`]) : " tokens",
    ]));
    view.bar.style.width = `${(100 * row.tokens) / row.most}%`;
  }

  /** Tokens of each second as bars; where a worker was lost, a line. */
  drawPace({ pace, pace_from_s: from, now_s: now, marks }) {
    const [width, height, foot] = [400, 84, 18];
    const most = Math.max(8, ...pace);
    const x = (s) => (width * (s - from)) / 60;
    const bars = pace.map((n, i) => {
      const tall = ((height - foot) * n) / most;
      return `<rect x="${x(from + i).toFixed(1)}" y="${(height - foot - tall).toFixed(1)}" width="5.4" height="${tall.toFixed(1)}"/>`;
    });
    const lines = marks.filter((m) => m.kind === "lost").map((m) => `<line x1="${x(m.time_s).toFixed(1)}" x2="${x(m.time_s).toFixed(1)}" y1="0" y2="${height - foot}"/>`);
    const last = pace.slice(-3);
    const rate = last.length ? last.reduce((a, b) => a + b, 0) / last.length : 0;
    this.pace.setAttribute("aria-label", `${rate.toFixed(0)} tokens a second at ${now.toFixed(0)} s`);
    this.pace.innerHTML = `<div><b class="pd-num">${rate.toFixed(0)}</b> tokens/s, all readers</div>
      <svg viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" aria-hidden="true"><g class="pd-lc-bars">${bars.join("")}</g>
      <line class="pd-lc-axis" x1="0" x2="${width}" y1="${height - foot}" y2="${height - foot}"/><g class="pd-lc-marks">${lines.join("")}</g></svg>
      <div class="pd-lc-ends pd-muted pd-num"><span>${from} s</span><span>${from + 60} s</span></div>`;
  }

  drawLog(lines) {
    const nodes = lines.map(({ time_s, kind, text }) =>
      h("div", { "data-kind": kind }, [h("span.pd-num.pd-muted", {}, [`${time_s.toFixed(1)} s`]), h("span", {}, [text])]));
    clear(this.log, ...(nodes.length ? nodes : [h("div.pd-muted", {}, ["Nothing has happened yet."])]));
  }

  drawFoot(picture) {
    const { mode, machine } = this.get("header");
    const errors = picture.errors ? `, ${picture.errors} ended with an error` : "";
    const moved = `${picture.transfers} transfers of K and V, ${quantity(picture.transfer_bytes, "B")}`;
    const where = this.isLive ? `; ${mode}; ${machine}` : "";
    clear(this.foot, provenanceTag(this.isLive ? "measured" : "recorded"),
      h("span.pd-num", {}, [`${picture.now_s.toFixed(0)} s: ${picture.answers} answers finished${errors}; ${moved}${where}`]));
  }
}

/** What a worker does, "reads 600 tokens …", or its last step did, "wrote 3 tokens in 41 ms". */
function stepInWords({ reading, step_s, prompt_tokens: read, decodes: wrote }) {
  if (reading) return `reads ${reading} tokens …`;
  if (!step_s || !(read || wrote)) return "idle";
  const did = read && wrote ? `read ${read}, wrote ${wrote}` : `${read ? "read" : "wrote"} ${read || wrote} token${(read || wrote) === 1 ? "" : "s"}`;
  return `${did} in ${duration(step_s)}`;
}

/** Which workers have an answer, and what they do with it. */
function whereInWords({ stage, prefill_on: from, decode_on: to, error }) {
  const at = (name, role) => h("b", { "data-role": role }, [name]);
  const said = {
    queued: () => ["waits at the router"],
    reserving: () => ["asks ", at(to, "decode"), " for room"],
    prefilling: () => [at(from, "prefill"), " reads", ...(to ? [" for ", at(to, "decode")] : [])],
    moving: () => ["K and V: ", at(from, "prefill"), " → ", at(to, "decode")],
    decoding: () => [at(to, "decode"), " writes"],
    serving: () => [at(to, "both"), " reads and writes"],
    done: () => ["✓ whole"],
    failed: () => [h("span.pd-lc-error", {}, [`✗ ${error}`])],
  };
  return said[stage]();
}

export default { render };
