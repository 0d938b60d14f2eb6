// Shared by every widget of pdlab: building DOM, formatting quantities, themes. Prepended to each module.

/** Make an element: h("button.pd-btn", {title: "Play"}, ["▶"]). */
function h(spec, props = {}, children = []) {
  const [tag, ...classes] = spec.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  // JupyterLab looks for this on the focused element first; without it, arrow keys move cells.
  if (["input", "select", "button"].includes(tag)) node.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...[].concat(children).filter((c) => c != null));
  return node;
}

/** A titled section; returns [section, body]. */
function section(title, hint, name) {
  const body = h("div.pd-section-body");
  const heading = h("div.pd-section-title", {}, [title, hint ? h("span.pd-hint", {}, [hint]) : null]);
  return [h("section.pd-section" + (name ? "." + name : ""), { "aria-label": title }, [heading, body]), body];
}

function clear(node, ...children) {
  node.replaceChildren(...children.filter((c) => c != null));
}

const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** 1234567 -> "1.23 M"; three significant digits, so that a column of them lines up. */
function quantity(value, unit = "") {
  if (value == null || !isFinite(value)) return "–";
  const [scale, prefix] = PREFIXES.find(([s]) => Math.abs(value) >= s) ?? [1, ""];
  return `${digits(value / scale)} ${prefix}${unit}`.trim();
}

function digits(value) {
  if (value === 0) return "0";
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
}

function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds >= 1e-3 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} µs`;
}

/** Text of a token with its leading spaces and line breaks made visible. */
function tokenText(text) {
  const parts = [];
  const lead = text.match(/^ */)[0].length;
  if (lead) parts.push(h("span.pd-space", {}, ["·".repeat(lead)]));
  parts.push(text.slice(lead).replaceAll("\n", "↵").replaceAll("\t", "⇥") || (lead ? "" : "∅"));
  return parts;
}

/** A small label that says what kind of number this is: measured, predicted, simulated, recorded. */
function provenanceTag(kind) {
  return h("span.pd-tag", { "data-kind": kind }, [kind]);
}

/** The value of a palette colour, for canvas and SVG attributes. */
function paletteColor(node, name) {
  return getComputedStyle(node).getPropertyValue(`--pd-${name}`).trim();
}

/** Call `redraw` when JupyterLab's theme or the node's width changes; returns a function that stops. */
function onAppearance(node, redraw) {
  // A new theme's style sheet is there only after the attribute has changed.
  const theme = new MutationObserver(() => setTimeout(redraw, 150));
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  let width = 0;
  const size = new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    redraw();
  });
  size.observe(node);
  return () => (theme.disconnect(), size.disconnect());
}

/** A tooltip that follows the pointer inside `host`. */
function tooltip(host) {
  const tip = h("div.pd-tip", { role: "status", hidden: true });
  host.append(tip);
  return {
    show(event, lines) {
      clear(tip, ...lines.map((line, i) => h(i ? "div" : "div.pd-tip-head", {}, [line])));
      tip.hidden = false;
      const box = host.getBoundingClientRect();
      const left = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${event.clientY - box.top + 16}px`;
    },
    hide: () => (tip.hidden = true),
  };
}

/** An id for a part of an SVG that others refer to: one for each view on the page. */
function uniqueId(name) {
  return `pd-${name}-${Math.random().toString(36).slice(2)}`;
}

/** Listen to several traits; returns a function that stops listening. */
function listen(model, handlers) {
  for (const [event, handler] of Object.entries(handlers)) model.on(event, handler);
  return () => {
    for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
  };
}
