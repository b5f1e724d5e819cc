// One row block by block, with numbers that the reader may change.

function startOnline() {
  const status = byId("online-status");
  const stepper = new Stepper(byId("online-stepper"), {
    label: "online.stepper",
    status,
    interval: 1200,
    change: drawOnline,
  });

  byId("online-preset").addEventListener("change", (event) => load(event.target.value));
  byId("online-add").addEventListener("click", () => resizeRow(1));
  byId("online-remove").addEventListener("click", () => resizeRow(-1));

  function load(name) {
    const { scores, values } = PRESETS[name];
    row.written = scores.map((score, index) => ({ score, value: values[index] }));
    row.size = 2;
    drawInputs();
    readInputs(2);
  }

  function resizeRow(by) {
    const length = row.written.length + by;
    if (length < 1 || length > MOST_KEYS) return;
    if (by > 0) row.written.push({ score: "0", value: "0" });
    else row.written.pop();
    row.size = Math.min(row.size, length);
    drawInputs();
    readInputs();
  }

  function drawInputs() {
    const field = (kind, index) => {
      const input = make("input", { type: "text", autocomplete: "off", spellcheck: "false", "data-kind": kind });
      input.value = row.written[index][kind];
      input.setAttribute("aria-label", text(`online.${kind}.label`, { key: index }));
      input.addEventListener("input", () => {
        row.written[index][kind] = input.value;
        readInputs();
      });
      return input;
    };
    const columns = row.written.map((_, index) =>
      make("div", { class: "key" }, make("span", { class: "index" }, String(index)), field("score", index), field("value", index)),
    );
    const names = make("div", { class: "key names", "aria-hidden": "true" });
    for (const name of ["key", "score", "value"]) names.append(make("span", {}, text(`online.${name}`)));
    byId("online-inputs").replaceChildren(names, ...columns);
    byId("online-add").setAttribute("aria-disabled", row.written.length === MOST_KEYS);
    byId("online-remove").setAttribute("aria-disabled", row.written.length === 1);
  }

  /** Read what is written; wrong input leaves no row, rather than an old one. */
  function readInputs(step) {
    const wrong = [];
    const numbers = { score: [], value: [] };
    for (const input of byId("online-inputs").querySelectorAll("input")) {
      const { kind } = input.dataset;
      const { value, why } = parseNumber(input.value, kind);
      mark(input, value === null, wrong.length ? null : "online-error"); // which is about the first
      if (value === null) wrong.push({ kind, index: numbers[kind].length, written: input.value, why });
      numbers[kind].push(value);
    }
    [row.scores, row.values] = [numbers.score, numbers.value];
    row.error = wrong.length ? wrong[0] : null;
    row.notify(step);
  }

  function redraw(step) {
    const sizes = Array.from({ length: row.written.length }, (_, index) => String(index + 1));
    const focused = byId("online-block").contains(document.activeElement);
    radios(byId("online-block"), Object.fromEntries(sizes.map((size) => [size, size])), String(row.size), (size) => {
      row.size = Number(size);
      row.notify();
    });
    if (focused) byId("online-block").querySelector(":checked").focus();
    const { error } = row;
    byId("online-error").textContent = error
      ? refused(`online.error.${error.kind}`, { key: error.index, ...error })
      : "";
    const blocks = parts(row.written.length, row.size).length;
    if (error) stepper.move(stepper.step);
    else stepper.resize(blocks, step);
    drawSizes();
  }
  row.changed.push(redraw);
  redraws.push(() => {
    const chosen = Object.keys(PRESETS).map((name) => [name, text(`online.preset.${name}`)]);
    choices(byId("online-preset"), Object.fromEntries(chosen));
    drawInputs();
    readInputs();
  });
  load("example");
}

/** Everything that depends on the step: formulas, the table, the answers. */
function drawOnline(step) {
  const { scores, values, size, error } = row;
  const header = ["keys", "scores", "m", "factor", "l", "u", "answer"].map((name) => says("span", `online.column.${name}`));
  const formulas = byId("online-formulas");
  if (error) {
    fill(byId("online-steps"), header, []);
    formulas.replaceChildren();
    for (const id of ["online-answer", "online-exact", "online-mean"]) clear(byId(id));
    byId("online-verdict").textContent = "";
    byId("online-status").textContent = text("online.waiting");
    return;
  }
  const steps = onlineSteps(scores, values, size);
  fill(byId("online-steps"), header, steps.map((one, index) => stepRow(one, index < step)));
  byId("online-steps").querySelectorAll("tbody tr").forEach((line, index) => {
    line.classList.toggle("now", index === step - 1);
    line.classList.toggle("later", index >= step);
  });
  const now = steps[step - 1];
  formulas.replaceChildren(...(now ? formulaLines(now) : []));
  const exact = attention(scores, values);
  show(byId("online-exact"), exact);
  if (now) show(byId("online-answer"), now.answer);
  else clear(byId("online-answer"));
  const mean = meanOfBlocks(scores, values, size);
  show(byId("online-mean"), mean);
  const same = close(mean, exact);
  byId("online-verdict").textContent = text(same ? "online.same" : "online.off", { by: format(Math.abs(mean - exact)) });
  byId("online-mean").closest(".wrong").classList.toggle("right", same);
  byId("online-status").textContent = now
    ? text("online.status", {
        keys: keysOf(now),
        m: format(now.max),
        factor: format(now.rescale),
        l: format(now.total),
        u: format(now.unnormalised),
        answer: format(now.answer),
      })
    : text("online.start");
}

/** The text of `key` about what was typed, and why that will not do. */
const refused = (key, { written, why = "", ...values }) =>
  `${text(key, { ...values, written: quoted(written) })} ${why}`.trim();

/** What was typed, in a sentence. */
const quoted = (written) => (written.trim() ? text("online.quoted", { written: written.trim() }) : text("online.nothing"));

const close = (left, right) => Math.abs(left - right) <= 1e-12 * Math.max(1, Math.abs(left), Math.abs(right));
const keysOf = ({ first, last }) => (last - first === 1 ? String(first) : `${first}–${last - 1}`);

function stepRow(one, done) {
  const cells = [one.max, one.rescale, one.total, one.unnormalised, one.answer].map((value) =>
    done ? number(value) : make("td", { class: "number" }, "–"),
  );
  return [keysOf(one), make("td", {}, list(one.scores)), ...cells];
}

/** The recurrence with this step's numbers in it. */
function formulaLines({ before, scores, weights, rescale, max, total, unnormalised, first, last }) {
  const values = row.values.slice(first, last);
  const product = weights.map((weight, index) => `${format(weight)} · ${bracketed(values[index])}`).join(" + ");
  const lines = [
    ["m", `max(${[before.max, ...scores].map(format).join(", ")})`, max],
    [text("online.factor"), `exp(${format(before.max)} − ${bracketed(max)})`, rescale],
    ["l", `${format(rescale)} · ${format(before.total)} + ${weights.map(format).join(" + ")}`, total],
    ["u", `${format(rescale)} · ${bracketed(before.unnormalised)} + ${product}`, unnormalised],
  ];
  return lines.map(([name, how, result]) =>
    make("div", {}, make(name.length === 1 ? "var" : "span", {}, name), ` = ${how} = `, make("b", {}, format(result))),
  );
}

const bracketed = (value) => (value < 0 ? `(${format(value)})` : format(value));

/** The answer for every size of blocks, and the wrong one. */
function drawSizes() {
  const { scores, values, error } = row;
  const header = [text("online.block"), text("online.running.short"), text("online.exact.short"), text("online.mean.short")];
  const lines = error
    ? []
    : scores.map((_, index) => {
        const mean = meanOfBlocks(scores, values, index + 1);
        const exact = attention(scores, values);
        const cell = number(mean);
        cell.append(close(mean, exact) ? " ✓" : " ✗");
        return [String(index + 1), number(onlineSteps(scores, values, index + 1).at(-1).answer), number(exact), cell];
      });
  fill(byId("online-sizes"), header, lines);
}
