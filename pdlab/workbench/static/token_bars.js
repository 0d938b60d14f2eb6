// Tokens as rows of bars, before and after something was done to them, and typed values. Prepended to the
// labs that show next-token distributions; its look is in token_bars.css.

/** A number as it was typed, or the text itself, for Python to refuse. */
function readNumber(text) {
  const value = Number(text.trim().replace(",", "."));
  return text.trim() !== "" && Number.isFinite(value) ? value : text;
}

/** Redraw children without losing the focus that one of them has. */
function keepFocus(node, redraw) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  redraw();
  if (key) node.querySelector(`[data-key="${key}"]`)?.focus();
}

const keepKeys = (event) => event.key !== "Escape" && event.stopPropagation();
const niceTop = (value) => [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1].find((v) => value <= v) ?? 1;
const visibleText = (text) => text.replace(/^ +/, (lead) => "·".repeat(lead.length)).replaceAll("\n", "↵") || "∅";

function percent(part) {
  if (part === 0) return "0%";
  if (part < 0.0005) return "<0.1%";
  return `${(part * 100).toFixed(1)}%`;
}

/** The head of the bars' grid: ticks of a scale from 0 to `top`, and what the two numbers are. */
function scaleRow(top, before, after) {
  const ticks = [0, 0.5, 1].map((part) => h("span", { style: `left:${part * 100}%` }, [`${digits(part * top * 100)}%`]));
  return [h("span"), h("div.pd-tb-scale", { "aria-hidden": "true" }, ticks), h("span.pd-tb-h", {}, [before]), h("span.pd-tb-h", {}, [after]), h("span")];
}

/** The bar of one token: thin before, solid after, hatched where it is gone. Parts are of `top`. */
function tokenBar({ before, after, gone, chosen }, top, ...marks) {
  return h("div.pd-tb-bar", { "data-gone": gone, "data-chosen": chosen }, [
    h("i.pd-tb-before", { style: `width:${(before / top) * 100}%` }), h("i.pd-tb-after", { style: `width:${((gone ? before : after) / top) * 100}%` }), ...marks]);
}
