// Moving through the steps of a run: buttons, a strip of bars above a slider, keys. Prepended to the
// widgets that walk through steps; its look is in transport.css.

const ICONS = {
  first: "M3 3h2v10H3zM13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  play: "M4 2.5v11L13 8z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  forward: "M5 3v10l7-5z",
  last: "M11 3h2v10h-2zM3 3v10l7-5z",
};
const PLAY_MS = 650;

class Transport {
  /**
   * go(index) shows a frame. Optional: advance() is what forward does at the end, as long as
   * canAdvance() holds and isBusy() does not; keys maps further key names to actions.
   */
  constructor({ go, advance = () => {}, canAdvance = () => false, isBusy = () => false, keys = {} }) {
    Object.assign(this, { goTo: go, more: advance, canAdvance, isBusy, keys, count: 1, index: 0, timer: null });
    this.first = this.button("first", "To the start", () => this.go(0));
    this.back = this.button("back", "Back one step", () => this.go(this.index - 1));
    this.play = this.button("play", "Play", () => (this.timer ? this.pause() : this.start()));
    this.forward = this.button("forward", "Forward one step", () => this.advance());
    this.last = this.button("last", "To the end", () => this.go(this.count - 1));
    this.strip = h("div.pd-strip", { "aria-hidden": "true" });
    this.strip.addEventListener("pointerdown", (e) => this.go(this.indexAt(e)));
    this.slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => this.go(+this.slider.value) });
    this.counter = h("div.pd-counter.pd-num");
    this.note = h("div.pd-strip-note");
    const buttons = h("div.pd-buttons", {}, [this.first, this.back, this.play, this.forward, this.last]);
    this.node = h("div.pd-transport", {}, [buttons, h("div.pd-track", {}, [this.strip, this.slider]), this.counter, this.note]);
  }

  button(name, label, action) {
    const node = h("button", { type: "button", "aria-label": label, title: label, onclick: action });
    node.innerHTML = `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;
    return node;
  }

  /** The frames to walk through: one bar each, {height: 0 to 1, color: a palette name}, and what it means. */
  setBars(bars, note) {
    this.count = bars.length;
    this.slider.max = this.count - 1;
    const last = Math.max(1, this.count - 1);
    const width = Math.max(2, Math.min(14, (620 / this.count) * 0.7));
    clear(this.strip, ...bars.map((bar, i) =>
      h("i", { style: `left:calc(8px + (100% - 16px) * ${i / last});width:${width}px;height:${bar.height * 100}%;background:var(--pd-${bar.color})` })));
    this.note.textContent = note;
  }

  clip(index) {
    return Math.max(0, Math.min(index, this.count - 1));
  }

  /** Mark a frame as the one shown. */
  show(index, counter, description) {
    this.index = index;
    this.slider.value = index;
    this.slider.setAttribute("aria-valuetext", description);
    this.counter.textContent = counter;
    this.strip.querySelector("[aria-current]")?.removeAttribute("aria-current");
    this.strip.children[index]?.setAttribute("aria-current", "true");
    this.drawButtons();
  }

  get atEnd() {
    return this.index >= this.count - 1;
  }

  go(index) {
    this.goTo(this.clip(index));
  }

  advance() {
    if (!this.atEnd) this.go(this.index + 1);
    else if (this.canAdvance() && !this.isBusy()) this.more();
  }

  start() {
    if (this.atEnd && !this.canAdvance()) this.go(0);
    this.timer = setInterval(() => (this.atEnd && !this.canAdvance() ? this.pause() : this.advance()), PLAY_MS);
    this.drawPlay();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.drawPlay();
  }

  drawButtons() {
    this.first.disabled = this.back.disabled = this.index === 0;
    this.last.disabled = this.atEnd;
    this.forward.disabled = this.atEnd && !(this.canAdvance() && !this.isBusy());
  }

  drawPlay() {
    const [name, label] = this.timer ? ["pause", "Pause"] : ["play", "Play"];
    this.play.querySelector("path").setAttribute("d", ICONS[name]);
    this.play.setAttribute("aria-label", label);
    this.play.title = label;
  }

  indexAt(event) {
    const box = this.strip.getBoundingClientRect();
    const share = (event.clientX - box.left - 8) / (box.width - 16);
    return Math.round(share * (this.count - 1));
  }

  /** What a widget's root needs to take keys from JupyterLab; a select keeps its own, a button the space bar. */
  get takesKeys() {
    return { tabindex: 0, "data-lm-suppress-shortcuts": "true", onkeydown: (event) => this.onKey(event) };
  }

  onKey(event) {
    const moves = {
      ArrowRight: () => this.advance(),
      ArrowLeft: () => this.go(this.index - 1),
      Home: () => this.go(0),
      End: () => this.go(this.count - 1),
      " ": () => this.play.click(),
      ...this.keys,
    };
    const own = event.target.tagName === "SELECT" || (event.key === " " && event.target.tagName === "BUTTON");
    if (own || event.ctrlKey || event.metaKey || event.altKey || !moves[event.key]) return;
    moves[event.key]();
    event.preventDefault();
  }
}
