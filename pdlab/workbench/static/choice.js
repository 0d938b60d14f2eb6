// One of a few answers, as radio buttons: Tab comes in, the arrow keys choose.

function render({ model, el }) {
  const name = `pd-choice-${Math.random()}`;
  const choose = (event) => (model.set("value", event.target.value), model.save_changes());
  const inputs = model.get("options").map((value) => h("input", { type: "radio", name, value, onchange: choose }));
  const labels = inputs.map((input) => h("label", {}, [input, input.value]));
  const show = () => inputs.forEach((input) => (input.checked = input.value === model.get("value")));
  el.replaceChildren(h("div.pd-choice", { role: "radiogroup", "aria-label": model.get("label") }, labels));
  show();
  return listen(model, { "change:value": show });
}

export default { render };
