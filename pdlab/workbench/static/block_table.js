// The BlockTableView: block tables on the left, the pool they point into on the right, moves between.
// Frames come from block_frames.py.

const DROPPED = -1;
const MAX_CELLS = 1024;
const CELLS = [44, 36, 30, 24, 20, 17, 14, 12, 10];
const ROOMY = 40; // logical blocks up to which the tables have large cells
const [POOL_HEIGHT, HOST_HEIGHT] = [236, 86];
const MOVES = { copy: "copied for writing", swap_out: "swapped out", swap_in: "swapped in" };

function render({ model, el }) {
  const view = new BlockTable(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class BlockTable {
  constructor(model) {
    this.model = model;
    this.headId = uniqueId("head");
    this.build();
    this.stop = listen(model, {
      "change:frames": () => this.reload(),
      "change:step": () => this.model.get("step") !== this.index && this.show(this.model.get("step")),
      "change:selected": () => this.frames && this.light(),
    });
    this.stopAppearance = onAppearance(this.body, () => this.frames && this.show(this.index));
  }

  destroy() {
    this.transport.pause();
    this.stop();
    this.stopAppearance();
  }

  // ---- building: once ---------------------------------------------------------------------

  build() {
    this.transport = new Transport({
      go: (index) => (this.show(index), this.push({ step: this.index })),
      keys: { ArrowDown: () => this.walk(1), ArrowUp: () => this.walk(-1), Escape: () => this.push({ selected: [] }) },
    });
    this.pill = h("span.pd-pill");
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.note = h("div.pd-note");
    this.body = h("div.pd-bt-body", {}, [this.tableSection(), this.poolSection()]);
    this.lines = h("div.pd-bt-lines", { "aria-hidden": "true" });
    this.body.append(this.lines);
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-blocks", { role: "group", "aria-label": "Block tables", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.pill, this.title]), this.note, this.transport.node, this.body, this.legend, this.foot,
    ]);
    this.body.addEventListener("pointerover", (e) => this.point(e.target.closest(".pd-bt-cell")));
    this.body.addEventListener("pointerleave", () => this.point(null));
    this.body.addEventListener("click", (e) => this.choose(e.target.closest(".pd-bt-cell")));
    for (const box of [this.tables, this.pool, this.hostPool]) box.addEventListener("scroll", () => this.drawLines());
  }

  tableSection() {
    const [node, body] = section("Block tables", "logical blocks; number: physical block");
    this.tables = h("div.pd-bt-tables");
    this.inspect = h("div.pd-bt-inspect", { role: "status" });
    this.legend = h("div.pd-legend");
    body.append(this.tables, this.inspect);
    return node;
  }

  poolSection() {
    const [node, body] = section("KV pool", "every physical block");
    this.pool = h("div.pd-bt-pool");
    const [host, hostBody] = section("Host memory", "swapped blocks wait here");
    host.classList.add("pd-bt-host");
    this.host = host;
    this.hostPool = h("div.pd-bt-pool");
    hostBody.append(this.hostPool);
    this.free = h("div.pd-bt-free");
    body.append(this.pool, host, this.free);
    return node;
  }

  // ---- moving -----------------------------------------------------------------------------

  reload() {
    this.frames = this.model.get("frames");
    this.header = this.model.get("header");
    const most = this.header.num_blocks;
    const bars = this.frames.map((f) => ({
      height: held(f).size / most,
      color: { mixed: "transfer", idle: "waiting" }[f.phase] ?? f.phase,
    }));
    this.transport.setBars(bars, "bar: share of the pool that sequences hold");
    this.drawFoot();
    this.show(this.model.get("step"));
  }

  push(values) {
    for (const [key, value] of Object.entries(values)) this.model.set(key, value);
    this.model.save_changes();
    if (values.selected) this.light();
  }

  /** Up and down: the logical block before or after, over all sequences. */
  walk(by) {
    const all = [...this.tables.querySelectorAll(".pd-bt-cell")];
    const [id, logical] = this.model.get("selected");
    const now = all.findIndex((c) => c.dataset.id === id && +c.dataset.logical === logical);
    const next = all[Math.max(0, Math.min(all.length - 1, now < 0 ? (by > 0 ? 0 : all.length - 1) : now + by))];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    this.choose(next);
  }

  choose(cell) {
    const target = this.logicalOf(cell);
    this.push({ selected: target ? [target.dataset.id, +target.dataset.logical] : [] });
  }

  point(cell) {
    this.pointed = cell;
    this.light();
  }

  /** The logical block that a cell stands for: itself, or the first that uses this physical block. */
  logicalOf(cell) {
    if (!cell || cell.dataset.logical != null) return cell;
    const { block, place } = cell.dataset;
    return [...this.tables.querySelectorAll(".pd-bt-cell")].find((c) => c.dataset.block === block && c.dataset.place === place);
  }

  // ---- drawing ----------------------------------------------------------------------------

  show(index) {
    this.index = this.transport.clip(index);
    const frame = (this.frame = this.frames[this.index]);
    this.owners = owners(frame, this.header.block_size);
    const color = { mixed: "transfer", idle: "waiting" }[frame.phase] ?? frame.phase;
    this.pill.style.cssText = `background:var(--pd-${color});color:var(--pd-on-${color})`;
    this.pill.textContent = frame.phase;
    this.title.textContent = frame.events[0];
    this.note.textContent = frame.events.slice(1).join(" ");
    this.note.scrollTop = 0;
    this.transport.show(this.index, `engine step ${frame.step}`, frame.events.join(" "));
    this.drawTables(frame);
    this.drawPool(frame);
    this.drawHost(frame);
    this.drawFree(frame);
    this.drawLegend(frame);
    this.pointed = null;
    this.root.dataset.step = this.index;
    this.light();
  }

  colorIndex(id) {
    return (this.header.sequences[id] ?? 0) % 8;
  }

  drawTables(frame) {
    const rows = frame.tables.map((t) => this.row(t, "pool", doing(t)));
    rows.push(...frame.host.map((t) => this.row({ ...t, hits: [0, 0] }, "host", "in host memory")));
    const count = [...frame.tables, ...frame.host].reduce((sum, t) => sum + t.blocks.length, 0);
    const [cell, tall] = count <= ROOMY ? [44, 38] : [34, 28];
    this.tables.style.setProperty("--pd-cell", `${cell}px`);
    this.tables.style.setProperty("--pd-cell-height", `${tall}px`);
    this.tables.toggleAttribute("data-small", cell < 44);
    if (frame.waiting.length) rows.push(h("div.pd-muted", {}, [`waiting: ${frame.waiting.join(", ")}`]));
    clear(this.tables, ...(rows.length ? rows : [h("div.pd-muted", {}, ["No sequence holds a block."])]));
  }

  row(table, place, state) {
    const size = this.header.block_size;
    const fresh = new Set(place === "pool" ? this.frame.new : []);
    const cells = table.blocks.map((block, logical) => {
      const filled = Math.max(0, Math.min(size, table.computed - logical * size));
      const cell = this.cell(block, [{ id: table.id, filled }], { place, hit: logical >= table.hits[0] && logical < table.hits[1], fresh: fresh.has(block) });
      Object.assign(cell.dataset, { id: table.id, logical });
      return cell;
    });
    const swatch = h("i", { style: `background:var(--pd-seq-${this.colorIndex(table.id)})` });
    return h("div.pd-bt-row", {}, [
      h("div.pd-bt-name", {}, [h("span", {}, [swatch, table.id]), h("small", {}, [` ${table.computed} tokens`]), h("div", {}, [state])]),
      h("div.pd-bt-cells", {}, cells),
    ]);
  }

  /** One block: filled from below in its owners' colours, or free, cached, dropped. */
  cell(block, users, { place = "pool", hit = false, fresh = false, kind = null, label = true } = {}) {
    const node = h("div.pd-bt-cell", { "data-block": block, "data-place": place, "data-hit": hit, "data-new": fresh });
    if (block === DROPPED) node.dataset.kind = "dropped";
    else if (kind) node.dataset.kind = kind;
    else {
      const fill = Math.max(...users.map((u) => u.filled)) / this.header.block_size;
      node.append(h("i", { style: `height:${fill * 100}%;background:${this.paint(users)}` }));
      if (users.length === 1) node.style.color = fill === 1 ? `var(--pd-seq-on-${this.colorIndex(users[0].id)})` : "#1B1F24";
      node.toggleAttribute("data-chip", users.length > 1 || (fill > 0 && fill < 1)); // on two colours
    }
    const number = place === "host" ? `h${block}` : String(block);
    if (label) node.append(h("b", {}, [h("span", {}, [block === DROPPED ? "" : number])]));
    return node;
  }

  paint(users) {
    const colors = [...new Set(users.map((u) => `var(--pd-seq-${this.colorIndex(u.id)})`))];
    if (colors.length === 1) return colors[0];
    return `repeating-linear-gradient(45deg, ${colors.map((c, i) => `${c} ${i * 7}px ${(i + 1) * 7}px`).join(", ")})`;
  }

  drawPool(frame) {
    const { num_blocks: total } = this.header;
    const [cached, fresh, others] = [frame.cached, frame.new, frame.others].map((blocks) => new Set(blocks));
    const count = Math.min(total, MAX_CELLS);
    const label = this.layout(this.pool, count, POOL_HEIGHT);
    clear(this.pool, ...Array.from({ length: count }, (_, block) => {
      const users = this.owners.pool.get(block) ?? [];
      const kind = users.length ? null : others.has(block) ? "others" : cached.has(block) ? "cached" : "free";
      return this.cell(block, users, { kind, fresh: fresh.has(block), label });
    }));
    if (count < total) this.pool.append(h("div.pd-hint", { style: "grid-column:1/-1" }, [`${total - count} more blocks are not drawn`]));
  }

  /** Cells as large as fit without scrolling; returns whether they have room for a number. */
  layout(grid, count, height) {
    const width = (grid.clientWidth || 400) - 10;
    const fits = CELLS.map((cell) => {
      const gap = cell > 20 ? 4 : 2;
      const most = Math.max(1, Math.floor((width + gap) / (cell + gap)));
      const columns = Math.min(count, most >= 8 ? most - (most % 4) : most);
      const tall = cell - (cell > 20 ? 6 : 2);
      return { cell, tall, columns, height: Math.ceil(count / columns) * (tall + gap) };
    });
    const chosen = fits.find((f) => f.height <= height) ?? fits.at(-1);
    grid.style.gridTemplateColumns = `repeat(${chosen.columns}, ${chosen.cell}px)`;
    grid.style.setProperty("--pd-cell", `${chosen.cell}px`);
    grid.style.setProperty("--pd-cell-height", `${chosen.tall}px`);
    grid.toggleAttribute("data-small", chosen.cell < 36);
    return chosen.cell >= 30;
  }

  drawHost(frame) {
    const count = Math.min(this.header.num_host_blocks, MAX_CELLS);
    this.host.hidden = !count;
    if (!count) return;
    const label = this.layout(this.hostPool, count, HOST_HEIGHT);
    clear(this.hostPool, ...Array.from({ length: count }, (_, block) => {
      const users = this.owners.host.get(block) ?? [];
      return this.cell(block, users, { place: "host", kind: users.length ? null : "free", label });
    }));
  }

  drawFree(frame) {
    const empty = frame.num_free - frame.num_cached;
    const kept = frame.num_cached ? `, ${frame.num_cached} with a cached prefix (first to be evicted: ${frame.evict_first[0]})` : "";
    const next = frame.next_taken.length ? ` The next step takes ${list(frame.next_taken)}.` : "";
    clear(this.free, h("b", {}, [`${frame.num_free} blocks can be taken after this step`]), `: ${empty} empty${kept}.${next}`);
  }

  drawLegend(frame) {
    const entry = (style, label) => h("span", {}, [h("i.pd-swatch", { style }), label]);
    const cells = [
      entry("background:var(--pd-wasted)", "taken, still empty"), entry("background:var(--pd-free)", "free"),
      frame.cached.length ? entry("background:repeating-linear-gradient(135deg,var(--pd-cached) 0 2px,var(--pd-free) 2px 4px)", "free, prefix kept") : null,
      frame.others.length ? h("span", {}, [h("i.pd-swatch.pd-bt-cross"), "held by another engine"]) : null,
      frame.tables.some((t) => t.hits[1]) ? entry("background:var(--pd-cached);height:5px", "from the prefix cache") : null,
      frame.new.length ? entry("box-shadow:inset 0 0 0 2px var(--pd-text)", "new in this step") : null,
      frame.tables.some((t) => t.blocks.includes(DROPPED)) ? entry("border:1.5px dashed var(--pd-muted)", "given back") : null,
    ];
    clear(this.legend, ...cells);
  }

  drawFoot() {
    const { machine, cut, block_size: size } = this.header;
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`on ${machine}; block size ${size} tokens`]),
      h("span", {}, ["←→ steps, ↑↓ blocks"]), cut ? h("span", {}, [`the last ${cut} steps are not shown`]) : null);
  }

  // ---- pointing ---------------------------------------------------------------------------

  /** Light up the chosen block wherever it appears, say in words what it is, and draw the lines. */
  light() {
    const [id, logical] = this.model.get("selected");
    const cells = [...this.tables.querySelectorAll(".pd-bt-cell")];
    const chosen = cells.find((c) => c.dataset.id === id && +c.dataset.logical === logical);
    this.lit = this.pointed ?? chosen ?? null;
    const { block, place } = this.lit?.dataset ?? {};
    for (const cell of this.body.querySelectorAll(".pd-bt-cell")) {
      const same = cell === this.lit || (block !== String(DROPPED) && cell.dataset.block === block && cell.dataset.place === place);
      cell.toggleAttribute("data-lit", same);
    }
    clear(this.inspect, this.lit ? this.describe(this.lit) : h("span.pd-muted", {}, ["Point at a block, or press ↓, to see where its tokens lie."]));
    this.drawLines();
  }

  describe(cell) {
    const { block_size: size } = this.header;
    const { place, logical } = cell.dataset;
    const block = +cell.dataset.block;
    if (block === DROPPED) return `${cell.dataset.id}, logical block ${logical}: given back, because no query will see it again.`;
    const users = this.owners[place].get(block) ?? [];
    const name = place === "host" ? `host block ${block}` : `physical block ${block}`;
    const slots = `slots ${span(block * size, size)}`;
    if (cell.dataset.kind === "others") return `${capital(name)}: held by another engine; ${slots}.`;
    if (place === "host" && !users.length && this.header.shares_memory) return `${capital(name)}: free, or another engine's; ${slots}.`;
    if (!users.length) return `${capital(name)}: free${cell.dataset.kind === "cached" ? ", but its prefix can still be found" : ""}; ${slots}.`;
    const first = users.find((u) => u.id === cell.dataset.id) ?? users[0];
    const others = users.filter((u) => u !== first).map((u) => u.id);
    const start = first.logical * size;
    const rule = `position p lies in slot ${block} × ${size} + p mod ${size}`;
    const shared = others.length ? `, shared with ${others.join(" and ")}` : "";
    const where = `${first.id}, logical block ${first.logical} → ${name}${shared}: positions ${span(start, size)}, ${first.filled} of ${size} slots filled.`;
    return place === "host" ? where : `${where} ${capital(slots)}: ${rule}.`;
  }

  find(box, block, place) {
    return box.querySelector(`.pd-bt-cell[data-block="${block}"][data-place="${place}"]`);
  }

  /** Arrows for the moves of this step, a dashed line from the chosen logical block to its physical one. */
  drawLines() {
    const paths = (this.frame?.moves ?? []).map(([kind, source, target]) => {
      const from = kind === "swap_in" ? this.find(this.hostPool, source, "host") : this.find(this.pool, source, "pool");
      const to = kind === "swap_out" ? this.find(this.hostPool, target, "host") : this.find(this.pool, target, "pool");
      return this.path(from, to, MOVES[kind]);
    });
    const logical = this.logicalOf(this.lit);
    if (logical && logical.dataset.block !== String(DROPPED)) {
      const { block, place } = logical.dataset;
      paths.push(this.path(logical, this.find(place === "host" ? this.hostPool : this.pool, block, place), null));
    }
    const head = `<defs><marker id="${this.headId}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="4.5" markerHeight="4.5" orient="auto"><path d="M0 0L10 5L0 10z" style="fill:var(--pd-text);stroke:none"/></marker></defs>`;
    this.lines.innerHTML = `<svg>${head}${paths.join("")}</svg>`;
  }

  /** `title` says what an arrow is; without one it is the link to the chosen block. */
  path(from, to, title) {
    if (!from || !to || hiddenByScroll(from) || hiddenByScroll(to)) return "";
    const box = this.body.getBoundingClientRect();
    const [a, b] = [from, to].map((n) => n.getBoundingClientRect());
    const [dx, dy] = [-box.left, -box.top];
    if (!title) return curve([a.right + dx, a.top + a.height / 2 + dy], [b.left + dx, b.top + b.height / 2 + dy], null);
    const at = (r, share) => r.left + r.width * share + dx;
    if (place(from) === place(to)) return arc([at(a, 0.5), a.top + 3 + dy], [at(b, 0.5), b.top + 3 + dy], this.headId, title);
    const down = b.top > a.top;
    return curve([at(a, 0.84), (down ? a.bottom : a.top) + dy], [at(b, 0.84), (down ? b.top : b.bottom) + dy], this.headId, title);
  }
}

const place = (cell) => cell.dataset.place;

/** A line that leaves and arrives upright (or level, for a link). */
function curve([x1, y1], [x2, y2], head, title) {
  const [bx, by] = head == null ? [30, 0] : [0, (y2 - y1) / 2];
  return stroke(`M${x1} ${y1}C${x1 + bx} ${y1 + by} ${x2 - bx} ${y2 - by} ${x2} ${y2}`, head, title);
}

/** An arrow from the top of one block over the others to the top of another. */
function arc([x1, y1], [x2, y2], head, title) {
  const rise = Math.min(y1, y2) - 14 - Math.min(20, Math.abs(x2 - x1) * 0.06);
  return stroke(`M${x1} ${y1}C${x1} ${rise} ${x2} ${rise} ${x2} ${y2}`, head, title);
}

function stroke(d, head, title) {
  const kind = head == null ? 'class="pd-bt-link"' : `class="pd-bt-move" marker-end="url(#${head})"`;
  return `<path class="pd-bt-halo" d="${d}"/><path ${kind} d="${d}"><title>${title ?? ""}</title></path>`;
}

/** Whether a cell lies outside the visible part of the box that scrolls it. */
function hiddenByScroll(cell) {
  const box = cell.closest(".pd-bt-tables, .pd-bt-pool").getBoundingClientRect();
  const own = cell.getBoundingClientRect();
  return own.bottom < box.top + 4 || own.top > box.bottom - 4;
}

function held(frame) {
  const blocks = new Set(frame.tables.flatMap((t) => t.blocks));
  blocks.delete(DROPPED);
  return blocks;
}

/** Who uses each physical block of the pool and of host memory: block -> [{id, logical, filled}]. */
function owners(frame, size) {
  const collect = (tables) => {
    const found = new Map();
    for (const { id, blocks, computed } of tables) {
      blocks.forEach((block, logical) => {
        if (block === DROPPED) return;
        const filled = Math.max(0, Math.min(size, computed - logical * size));
        found.set(block, [...(found.get(block) ?? []), { id, logical, filled }]);
      });
    }
    return found;
  };
  return { pool: collect(frame.tables), host: collect(frame.host) };
}

function doing(table) {
  const did = { prefill: "prefill", decode: "decode", fork: "forks off" }[table.did] ?? "idle";
  return table.finished ? `${did}, finishes` : did;
}

function list(blocks) {
  return blocks.length > 6 ? `${blocks.slice(0, 6).join(", ")} and ${blocks.length - 6} more` : blocks.join(", ");
}

/** 8, 4 -> "8–11", on one line. */
const span = (start, count) => `${start}\u2060–\u2060${start + count - 1}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);

export default { render };
