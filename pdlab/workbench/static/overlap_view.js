// The OverlapView: two lanes a run, drawn as positioned boxes on one time axis.

function render({ model, el }) {
  const root = h("div.pdlab.pd-overlap-view");
  const chart = h("div.pd-ov-chart");
  const slider = h("input", {
    type: "range", min: 0, step: 1, "aria-label": "First step shown",
    oninput: () => (model.set("first", +slider.value), model.save_changes()),
  });
  const legend = h("div.pd-ov-legend", { "aria-hidden": "true" }, KINDS.map((kind) =>
    h("span", {}, [h("i", { "data-kind": kind }), kind])).concat([
    h("span", {}, [h("i", { "data-kind": "tell", "data-hidden": "true" }), "hidden behind compute"])]));
  const foot = h("div.pd-muted.pd-ov-foot");
  root.append(h("div.pd-ov-top", {}, [h("label", {}, ["from step ", slider])]), chart, legend, foot);
  el.replaceChildren(root);
  const tip = tooltip(root);

  function box(piece, longest) {
    const [lane, kind, step, start, end, hidden] = piece;
    const node = h("i", {
      "data-kind": kind, "data-hidden": hidden && kind !== "wait" && lane === "host" ? "true" : null,
      style: `left:${(100 * start) / longest}%;width:${(100 * (end - start)) / longest}%`,
    });
    node.addEventListener("pointermove", (e) =>
      tip.show(e, [`${kind}, step ${step}`, `${duration(end - start)}${hidden && lane === "host" ? ", while the model computed" : ""}`]));
    node.addEventListener("pointerleave", tip.hide);
    return node;
  }

  function draw() {
    const runs = model.get("runs");
    slider.max = model.get("last_first");
    slider.value = model.get("first");
    const longest = Math.max(...runs.map((run) => run.wall_s));
    clear(chart, ...runs.map((run) => {
      const words = `${duration(run.step_s)} from step to step; ${duration(run.hidden_s)} of ${duration(run.host_s)} ` +
        `host time hidden; the model computes ${Math.round(100 * run.compute_share)}% of the time`;
      const lanes = ["host", "compute"].map((lane) => h("div.pd-ov-row", {}, [
        h("span.pd-ov-lane", {}, [lane]),
        h("div.pd-ov-lanebox", { role: "img", "aria-label": `${run.name}, ${lane}: ${words}` },
          run.pieces.filter((piece) => piece[0] === lane).map((piece) => box(piece, longest))),
      ]));
      return h("section", { "aria-label": run.name }, [h("div.pd-ov-name", {}, [h("b", {}, [run.name]), " ", words]), ...lanes]);
    }));
    foot.textContent = `${duration(longest)} shown · recorded on ${model.get("machine")}`;
  }

  draw();
  return listen(model, { "change:runs": draw, "change:first": draw });
}

const KINDS = ["schedule", "draft", "launch", "compute", "wait", "book", "tell", "caller"];

export default { render };
