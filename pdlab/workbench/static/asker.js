// One question to the kernel at a time; what is asked meanwhile waits, merged by kind. Prepended to the
// widgets whose every control is answered by Python. The kernel sets `answered` to the question's number.

class Asker {
  /** `changed(arrived)` is called when a question goes out (false) and when its answer is there (true). */
  constructor(model, changed) {
    Object.assign(this, { model, changed, number: model.get("answered"), waiting: [], asked: null });
    this.stop = listen(model, { "change:answered": () => this.arrived() });
  }

  get isBusy() {
    return this.asked !== null || this.waiting.length > 0;
  }

  /** Ask; a question of the same kind that has not gone out yet takes over the new values. */
  ask(question) {
    const same = this.waiting.find((q) => q.type === question.type && q.values && question.values);
    if (same) Object.assign(same.values, question.values);
    else this.waiting.push(question);
    if (this.asked === null) this.next();
    this.changed(false);
  }

  next() {
    this.asked = this.waiting.shift() ?? null;
    if (this.asked) this.model.send({ ...this.asked, number: ++this.number });
  }

  arrived() {
    if (this.asked === null) return; // the answer to another view
    if (this.model.get("answered") < this.number) return;
    this.next();
    this.changed(true);
  }
}

/** A function that calls `draw` once for all traits that come in one message. */
function onceSoon(draw) {
  let planned = false;
  return () => {
    if (planned) return;
    planned = true;
    queueMicrotask(() => ((planned = false), draw()));
  };
}
