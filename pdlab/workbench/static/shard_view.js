// The ShardView: what each rank holds, and what travels between the ranks in a step. Data: shard_data.py.

const LOOKS = { embed: "vocabulary", output: "heads", mlp: "mlp", hidden: "layers", logits: "vocabulary" };

function render({ model, el }) {
  const view = new ShardView(model);
  el.replaceChildren(view.root);
  view.reload();
  return () => view.destroy();
}

class ShardView {
  constructor(model) {
    this.model = model;
    this.build();
    this.stop = listen(model, {
      "change:frames": () => this.reload(),
      "change:step": () => model.get("step") !== this.index && this.show(model.get("step")),
    });
  }

  destroy() {
    this.transport.pause();
    this.stop();
  }

  build() {
    this.transport = new Transport({
      go: (index) => (this.show(index), this.model.set("step", this.index), this.model.save_changes()),
    });
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.note = h("div.pd-note");
    const [map, mapBody] = section("Who holds what", "counted from the shape", "pd-sh-map");
    this.map = h("div.pd-sh-ranks", { role: "table", "aria-label": "what each rank holds" });
    this.mapNote = h("div.pd-hint");
    mapBody.append(this.map, this.mapNote);
    const [told, toldBody] = section("What travels in this step", "all ranks together; time: of the slowest, waiting for others included", "pd-sh-told");
    this.table = h("div.pd-sh-table");
    toldBody.append(this.table);
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-shard-view", { role: "group", "aria-label": "Shards", ...this.transport.takesKeys }, [
      h("div.pd-head", {}, [this.title]), this.note, map, this.transport.node, told, this.foot]);
  }

  reload() {
    this.frames = this.model.get("frames");
    this.header = this.model.get("header");
    const most = Math.max(1, ...this.frames.map((f) => f.wire_bytes));
    this.transport.setBars(this.frames.map((f) => ({ height: f.wire_bytes / most, color: f.phase === "mixed" ? "transfer" : f.phase === "idle" ? "waiting" : f.phase })), "bar height: bytes that left a rank in the step");
    this.drawMap();
    const { machine, host, link, num_cut: cut } = this.header;
    clear(this.foot, provenanceTag("recorded"), h("span", {}, [`on ${machine}${host ? `, ranks: ${host}` : ""}; bytes are counted as they are sent`]),
      link ? h("span", {}, [`between ranks a simulated link: ${link}`]) : null,
      provenanceTag("predicted"), h("span", {}, ["the formula knows the shapes alone"]),
      cut ? h("span", {}, [`${cut} later steps are not shown`]) : null);
    this.show(this.model.get("step"));
  }

  show(index) {
    this.index = this.transport.clip(index);
    const frame = this.frames[this.index];
    this.title.textContent = frame.title;
    const pieces = frame.micro_batches;
    const exchanged = Math.max(0, ...frame.exchanges.map((e) => e.wall_s));
    this.note.textContent = pieces.length > 1 ? `${frame.num_tokens} rows in ${pieces.length} micro-batches: ${pieces.join(" + ")}; the step took ${duration(frame.wall_s)}`
      : `every rank of a stage computes ${frame.num_tokens === 1 ? "the one row" : `all ${frame.num_tokens} rows`}, with its part of the weights; the step took ${duration(frame.wall_s)}${exchanged ? "" : "; nothing travelled"}`;
    this.transport.show(this.index, `engine step ${frame.step}`, frame.title);
    this.drawTable(frame);
    this.root.dataset.frame = this.index;
  }

  // ---- who holds what ---------------------------------------------------------------------

  drawMap() {
    const { columns, ranks, num_stages: stages, uneven, grid } = this.header;
    const head = [h("span"), ...columns.map(([key, thing, total]) => h("span.pd-sh-head", { "data-column": key }, [`${total.toLocaleString("en")} ${thing}`]))];
    const rows = ranks.flatMap((rank) => [
      h("div.pd-sh-rank", { role: "rowheader" }, [h("b", {}, [`rank ${rank.rank}`]), stages > 1 ? ` stage ${rank.stage}` : "", h("div.pd-hint.pd-num", {}, [`${quantity(rank.weight_bytes, "B")}, KV ${Math.round(100 * rank.kv_share)}%`])]),
      ...columns.map(([key, thing, total]) => this.cell(rank, key, thing, total))]);
    clear(this.map, ...head, ...rows);
    this.mapNote.textContent = `${grid} ranks (tensor x pipeline): ${uneven.length ? uneven.join("; ") : "everything is cut evenly"}. E: embedding, H: head; KV: part of a token's K and V`;
  }

  cell(rank, key, thing, total) {
    const none = key === "vocabulary" && !rank.has_embedding && !rank.has_head;
    const [first, end] = none ? [0, 0] : rank[key];
    const what = end > first + 1 ? `${first.toLocaleString("en")}–${(end - 1).toLocaleString("en")}` : end > first ? first.toLocaleString("en") : "–";
    const where = key === "vocabulary" ? ` ${[rank.has_embedding && "E", rank.has_head && "H"].filter(Boolean).join(" ")}` : "";
    const style = `left:${(100 * first) / total}%;width:${(100 * (end - first)) / total}%;background:var(--pd-run-${rank.rank % 8})`;
    return h("div.pd-sh-cell", { role: "cell", "data-column": key, title: `rank ${rank.rank}: ${what} of ${total.toLocaleString("en")} ${thing}${where}` }, [
      h("span.pd-num", {}, [what + where]), h("div.pd-sh-bar", {}, [h("i", { style })])]);
  }

  // ---- what travels -----------------------------------------------------------------------

  drawTable(frame) {
    if (!frame.exchanges.length) return clear(this.table, h("div.pd-muted", {}, ["Nothing: one rank has all it needs."]));
    const head = ["", "calls of a rank", "on the wires", "by the formula", "", "time"].map((text) => h("span.pd-sh-h", {}, [text]));
    const most = Math.max(1, ...frame.exchanges.map((e) => e.wire_bytes));
    clear(this.table, ...head, ...frame.exchanges.flatMap((each) => this.row(each, most)));
  }

  row(each, most) {
    const calls = `${each.num_calls} ${each.kind.replace("_", "-")}${each.num_calls > 1 ? "s" : ""}`;
    const known = each.formula_bytes !== null;
    const same = each.formula_bytes === each.wire_bytes;
    const verdict = !known ? "–" : same ? "✓ equal" : `≠ by ${quantity(each.wire_bytes - each.formula_bytes, "B")}`;
    const label = `${each.part}: ${calls}, ${each.wire_bytes.toLocaleString("en")} bytes counted, ${known ? each.formula_bytes.toLocaleString("en") : "no"} by the formula, ${duration(each.wall_s)}`;
    const name = h("div.pd-sh-part", { tabindex: 0, "aria-label": label, title: this.header.parts[each.part] }, [h("b", {}, [each.part]), h("span.pd-hint", {}, [this.header.parts[each.part]])]);
    const wide = h("div.pd-sh-wire", {}, [h("i", { style: `width:${(100 * each.wire_bytes) / most}%` }), h("span.pd-num", {}, [quantity(each.wire_bytes, "B")])]);
    const cells = [name, h("span.pd-num", {}, [calls]), wide, h("span.pd-num", {}, [known ? quantity(each.formula_bytes, "B") : "–"]), h("span.pd-sh-verdict", { "data-same": String(known && same) }, [verdict]), h("span.pd-num", {}, [duration(each.wall_s)])];
    for (const cell of cells) {
      cell.addEventListener("pointerenter", () => (this.root.dataset.look = LOOKS[each.part]));
      cell.addEventListener("pointerleave", () => delete this.root.dataset.look);
    }
    name.addEventListener("focus", () => (this.root.dataset.look = LOOKS[each.part]));
    name.addEventListener("blur", () => delete this.root.dataset.look);
    return cells;
  }
}

export default { render };
