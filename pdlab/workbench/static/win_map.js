// The WinMap: a tile a pair of limits, what every way serves there, and computing for other settings.
// Data: win_map_data.py.

function render({ model, el }) {
  const view = new WinMap(model);
  el.replaceChildren(view.root);
  view.draw();
  return () => view.destroy();
}

class WinMap {
  constructor(model) {
    this.model = model;
    this.asker = new Asker(model, () => this.drawControls());
    this.build();
    const soon = onceSoon(() => this.draw());
    this.stop = listen(model, { "change:shown": soon, "change:message": soon, "change:cell": soon, "change:pace": soon, "change:work": () => this.drawWork(), "change:workload": soon, "change:num_workers": soon, "change:link": soon, "change:machine": soon });
    model.send({ type: "views", change: 1 });
  }

  destroy() {
    this.stop();
    this.asker.stop();
    this.model.send({ type: "views", change: -1 });
  }

  get = (name) => this.model.get(name);

  build() {
    const { workloads, machines, links, num_workers: counts } = this.get("header");
    this.title = h("div.pd-title", { "aria-live": "polite" });
    this.message = h("div.pd-pl-message", { role: "alert", hidden: true });
    const pick = (label, name, values, text = String) => {
      const node = h("select", { "aria-label": label, onchange: () => this.asker.ask({ type: "set", values: { [name]: values[node.selectedIndex] } }) }, values.map((v) => h("option", { value: v }, [text(v)])));
      return [name, node, values, group(label, node)];
    };
    this.picks = [
      pick("workload", "workload", Object.keys(workloads)), pick("workers", "num_workers", counts), pick("each", "machine", Object.keys(machines), (v) => machines[v]), pick("link", "link", links)];
    const ask = (type) => () => this.asker.ask({ type });
    this.computeButton = h("button.pd-pl-run", { type: "button", onclick: ask("compute") }, ["Compute"]);
    this.stopButton = h("button", { type: "button", hidden: true, onclick: ask("stop") }, ["Stop"]);
    this.bar = h("progress", { hidden: true, "aria-label": "simulated runs" });
    this.workText = h("span", { role: "status" });
    this.paces = radios("pace by", (pace) => this.showPace(pace));
    this.paces.sync(Object.keys(this.get("header").pace_names), this.get("header").pace_names, this.get("header").pace_hints);
    this.paceHint = h("span.pd-hint");
    this.grid = h("div.pd-wm-grid", { role: "grid", "aria-label": "which way of serving wins at each pair of limits", onkeydown: (e) => this.onKey(e) });
    this.legend = h("div.pd-legend");
    this.detail = h("div.pd-wm-detail", { "aria-live": "polite" });
    this.foot = h("div.pd-foot");
    this.root = h("div.pdlab.pd-lab.pd-win-map", { role: "group", "aria-label": "Win map" }, [
      h("div.pd-head", {}, [this.title]), this.message,
      h("div.pd-wm-pace", {}, [h("span.pd-pl-label", {}, ["pace by"]), this.paces.node, this.paceHint]),
      h("div.pd-wm-cols", {}, [h("div.pd-wm-map", {}, [h("div.pd-wm-axis", {}, ["TTFT limit in s →"]), this.grid, this.legend]), this.detail]),
      h("section.pd-pl-real", { "aria-label": "Other settings" }, [h("div.pd-pl-choices", {}, this.picks.map((p) => p[3])), h("div.pd-pl-realbar", {}, [this.computeButton, this.stopButton, this.bar, this.workText])]), this.foot]);
  }

  draw() {
    this.message.textContent = this.get("message");
    this.message.hidden = !this.get("message");
    this.drawControls();
    this.drawWork();
    const map = this.map();
    this.root.dataset.line = map.line ?? "";
    if (!map.best_modes) return clear(this.title, h("b", {}, ["Nothing was computed yet"]), ": choose settings, and compute");
    this.drawTitle(map);
    this.drawGrid(map);
    this.look(...this.get("cell"));
    clear(this.foot, provenanceTag("simulated"), h("span", {}, [`with step times ${map.basis.replace(/^simulated: /, "").replace(/^published: /, "published for ")}; router and schedulers are the real ones; goodput: the highest rate a device at which ${Math.round(100 * map.share)} % of the requests meet both limits, the first fifth of the traffic not counted; ${map.names.length} clusters, ${map.num_runs} runs`]));
  }

  /** What the limits on pace are limits on. */
  pace = () => this.get("header").pace_names[this.get("pace")];

  /** With the tiles of the measure that is chosen: those of all are here. */
  map() {
    const shown = this.get("shown");
    return { ...shown, ...shown.by_pace?.[this.get("pace")] };
  }

  showPace(pace) {
    this.model.set("pace", pace);
    if (this.at) this.model.set("cell", this.at);
    this.model.save_changes();
    this.draw();
  }


  drawTitle(map) {
    const all = map.best_modes.flat();
    const words = map.modes.map((mode, i) => `${mode} in ${all.filter((best) => best.length === 1 && best[0] === i).length}`);
    words.push(`tied in ${all.filter((best) => best.length > 1).length}`);
    const [what, ...how] = map.line.split("; ");
    const told = how.length ? `; ${how.join("; ")}. Of` : ": of";
    clear(this.title, h("b", {}, [what]), h("span.pd-hint", {}, [`${told} ${all.length} pairs of limits, most goodput per device: ${words.join(", ")}`]));
  }

  drawGrid(map) {
    const head = [h("span.pd-wm-corner", {}, [`${this.pace()} in ms ↓`]), ...map.ttfts_s.map((s) => h("span.pd-wm-x", { role: "columnheader", "aria-label": `TTFT ${duration(s)}` }, [digits(s)]))];
    this.tiles = map.best_modes.map((row, y) => row.map((best, x) => this.tile(map, best, y, x)));
    const rows = map.best_modes.flatMap((_, y) => [h("span.pd-wm-y", { role: "rowheader", "aria-label": `${this.pace()} ${duration(map.tpots_s[y])}` }, [digits(1000 * map.tpots_s[y])]), ...this.tiles[y]]);
    this.grid.style.gridTemplateColumns = `max-content repeat(${map.ttfts_s.length}, minmax(0, 1fr))`;
    clear(this.grid, ...head, ...rows);
    this.drawLegend(map);
  }

  letter = (mode) => mode[0].toUpperCase();

  drawLegend(map) {
    const tie = `within ${Math.round(100 * this.get("header").tie)} %`;
    const key = (style, letter, text) => h("span", {}, [h("i.pd-wm-key", style, [letter]), text]);
    const modes = map.modes.map((mode, i) => key({ "data-winner": i, style: `--tile: var(--pd-run-${i})` }, this.letter(mode), mode));
    const [first, second] = [0, 1].map((i) => this.letter(map.modes[i] ?? map.modes[0]));
    const tied = key({ "data-winner": 0, "data-tied": "", style: "--tile: var(--pd-run-0); --tied: var(--pd-run-1)" }, `${first}=${second}`, `tied, ${tie}: the best and who comes near`);
    clear(this.legend, ...modes, tied, key({}, "–", "none meets them"), h("span", {}, [`numbers: ${this.get("header").unit}`]));
  }

  /** Of several that are tied, the first is the best and the others come near. */
  tile(map, best, y, x) {
    const [winner] = best;
    const text = best.length ? [digits2(map.goodput[winner][y][x]), h("small", {}, [best.map((i) => this.letter(map.modes[i])).join("=")])] : ["–"];
    const told = best.length ? `${best.map((i) => map.modes[i]).join(" and ")}${best.length > 1 ? " tied" : ""}, ${digits(map.goodput[winner][y][x])}` : "none";
    const tied = best.length > 1 ? { "data-tied": "" } : {};
    const colors = best.length ? `--tile: var(--pd-run-${winner}); --tied: var(--pd-run-${best[1] ?? winner})` : "";
    return h("button.pd-wm-tile", { type: "button", role: "gridcell", tabindex: -1, "aria-label": `TTFT ${duration(map.ttfts_s[x])}, ${this.pace()} ${duration(map.tpots_s[y])}: ${told}`, "data-winner": winner ?? -1, ...tied, style: colors,
      onmouseenter: () => this.look(y, x), onfocus: () => this.look(y, x), onclick: () => this.keep(y, x) }, text);
  }

  /** Show what every way serves at a pair of limits. */
  look(y, x) {
    const map = this.map();
    if (y === undefined || !this.tiles?.[y]?.[x]) return;
    for (const row of this.tiles) for (const tile of row) (tile.tabIndex = -1), tile.removeAttribute("data-looked");
    this.tiles[y][x].tabIndex = 0;
    this.tiles[y][x].setAttribute("data-looked", "");
    this.at = [y, x];
    const values = map.modes.map((_, i) => map.goodput[i][y][x]);
    const most = Math.max(...values);
    const best = map.best_modes[y][x];
    const lead = this.leadOf(map, best, values);
    const bar = (mode, i) => h("div.pd-wm-way", { "data-mode": mode }, [
      h("div.pd-wm-name", {}, [h("i.pd-swatch", { style: `background:var(--pd-run-${i})` }), h(best.includes(i) ? "b" : "span", {}, [mode]), h("span.pd-num", {}, [values[i] ? `${values[i] >= map.most_rps ? "≥ " : ""}${digits(values[i])}` : "none"])]),
      h("div.pd-wm-track", {}, [h("div", { style: `width:${most ? (100 * values[i]) / most : 0}%;background:var(--pd-run-${i})` })]),
      h("div.pd-hint", {}, [values[i] ? map.names[map.best[i][y][x]] : "at no rate that was simulated"])]);
    clear(this.detail, h("div.pd-wm-at", {}, [h("b", {}, [`TTFT ≤ ${duration(map.ttfts_s[x])}, ${this.pace()} ≤ ${duration(map.tpots_s[y])}`]), h("div", {}, [lead])]), ...map.modes.map(bar), h("div.pd-hint", {}, [this.get("header").unit]));
    this.root.dataset.at = `${y},${x}`;
  }

  leadOf(map, best, values) {
    const names = best.map((i) => map.modes[i]);
    if (!best.length) return "no way meets them";
    if (best.length > 1) return `${names.join(" and ")} are tied, within ${Math.round(100 * this.get("header").tie)} %`;
    const second = Math.max(...values.filter((_, i) => i !== best[0]));
    return second > 0 ? `${names[0]} serves ${digits(values[best[0]] / second)} × the next one` : `only ${names[0]} meets them`;
  }

  keep(y, x) {
    this.model.set("cell", [y, x]);
    this.model.save_changes();
  }

  onKey(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    const tile = this.tiles[this.at[0] + move[0]]?.[this.at[1] + move[1]];
    event.preventDefault();
    event.stopPropagation();
    tile?.focus();
  }

  drawControls() {
    for (const [name, node, values] of this.picks) node.selectedIndex = values.indexOf(this.get(name));
    this.paces.choose(this.get("pace"));
    this.paceHint.textContent = this.get("header").pace_hints[this.get("pace")];
    this.root.dataset.pace = this.get("pace");
    this.picks[0][1].title = this.get("header").workloads[this.get("workload")];
    this.root.dataset.answered = this.get("answered");
  }

  drawWork() {
    const work = this.get("work");
    const running = work.state === "running";
    this.computeButton.disabled = running;
    this.stopButton.hidden = this.bar.hidden = !running;
    this.bar.max = work.of ?? 1;
    this.bar.value = work.done ?? 0;
    const words = {
      running: `${work.done} of ${work.of} runs simulated or spared; ${work.stage}`, done: `computed from ${this.get("shown").num_runs} simulated runs`,
      stopped: `Stopped after ${work.done} of ${work.of} runs: the map is the old one.`, failed: `It failed: ${work.error}`,
      nothing: `a hundred or so simulated runs of ${digits(this.get("header").short_s)} s of traffic, minutes in all; the map stays until it is there` };
    this.workText.textContent = words[work.state];
    this.root.dataset.work = work.state;
  }
}

/** Two digits: a tile is small. */
function digits2(value) {
  return Number(value.toPrecision(2)).toLocaleString("en", { maximumSignificantDigits: 2 });
}

export default { render };
