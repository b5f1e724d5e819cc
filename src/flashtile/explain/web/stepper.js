// Buttons and a slider that go through steps: arrow keys, Home and End work on all of them.

/** `options`: label (key of a text), status (element), interval (ms), change(step), called for every step. */
class Stepper {
  constructor(root, options) {
    this.options = options;
    this.timer = null;
    this.last = 0;
    this.back = make("button", { type: "button", class: "back" }, "‹");
    this.forward = make("button", { type: "button", class: "forward" }, "›");
    this.play = make("button", { type: "button", class: "play" });
    this.range = make("input", { type: "range", min: 0, max: 0, value: 0, step: 1 });
    this.where = make("span", { class: "where", "aria-hidden": "true" });
    root.classList.add("stepper");
    root.setAttribute("role", "group");
    root.append(this.range, this.back, this.forward, this.play, this.where);
    this.root = root;
    this.back.addEventListener("click", () => this.move(this.step - 1));
    this.forward.addEventListener("click", () => this.move(this.step + 1));
    this.play.addEventListener("click", () => (this.timer ? this.pause() : this.start()));
    this.range.addEventListener("input", () => this.move(this.step));
    root.addEventListener("keydown", (event) => this.key(event));
    redraws.push(() => this.label());
  }

  get step() {
    return Number(this.range.value);
  }

  /** Say how many steps there are. The current one stays where it can, and the end stays the end. */
  resize(last, step = this.step) {
    const atEnd = this.last > 0 && step === this.last;
    this.last = last;
    this.range.max = last;
    this.go(atEnd ? last : Math.min(step, last));
  }

  /** Go to a step by hand: this stops what plays by itself. */
  move(step) {
    this.pause();
    this.go(Math.max(0, Math.min(step, this.last)));
  }

  go(step) {
    this.range.value = step;
    this.options.change(step);
    this.label();
  }

  start() {
    if (this.step === this.last) this.go(0);
    this.options.status.setAttribute("aria-live", "off"); // not a sentence for every tick
    this.timer = setInterval(() => {
      if (this.step < this.last) this.go(this.step + 1);
      if (this.step === this.last) this.pause();
    }, this.options.interval);
    this.label();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.options.status.setAttribute("aria-live", "polite");
    this.label();
  }

  key(event) {
    if (event.target === this.range || event.altKey || event.ctrlKey || event.metaKey) return; // its own
    const targets = { ArrowLeft: this.step - 1, ArrowRight: this.step + 1, Home: 0, End: this.last };
    if (!(event.key in targets)) return;
    event.preventDefault();
    this.move(targets[event.key]);
  }

  label() {
    const described = text("stepper.where", { step: this.step, steps: this.last });
    this.where.textContent = `${this.step} / ${this.last}`;
    this.root.setAttribute("aria-label", text(this.options.label));
    this.back.setAttribute("aria-label", text("stepper.back"));
    this.forward.setAttribute("aria-label", text("stepper.forward"));
    this.play.textContent = text(this.timer ? "stepper.pause" : "stepper.play");
    this.range.setAttribute("aria-label", text(this.options.label));
    this.range.setAttribute("aria-valuetext", described);
    this.back.setAttribute("aria-disabled", this.step === 0);
    this.forward.setAttribute("aria-disabled", this.step === this.last);
  }
}
