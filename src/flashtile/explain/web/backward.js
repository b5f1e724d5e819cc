// The gradients of the row of part 2, from its LSE.

const BACKWARD_COLUMNS = ["key", "score", "probability", "exact", "ofValue", "ofProbability", "ofScore"];
const PRICE_LENGTH = 4096; // as the text says

function startBackward() {
  const input = byId("backward-upstream");
  const stepper = new Stepper(byId("backward-stepper"), {
    label: "backward.stepper",
    status: byId("backward-status"),
    interval: 1200,
    change: (step) => drawBackward(step, parseNumber(input.value, "value").value),
  });

  function redraw() {
    const { value, why } = parseNumber(input.value, "value");
    mark(input, value === null, "backward-error");
    const error = value === null ? refused("backward.error", { written: input.value, why }) : "";
    byId("backward-error").textContent = error;
    if (row.error) stepper.move(stepper.step);
    else stepper.resize(parts(row.scores.length, row.size).length, stepper.last ? undefined : 1);
  }

  input.addEventListener("input", redraw);
  row.changed.push(redraw);
  startRace(byId("backward-figure"), "backward");
  redraws.push(drawPrice);
}

function drawBackward(step, upstream) {
  const header = BACKWARD_COLUMNS.map((name) => says("span", `backward.column.${name}`));
  const status = byId("backward-status");
  if (row.error || upstream === null) {
    fill(byId("backward-table"), header, []);
    byId("backward-saved").replaceChildren();
    status.textContent = text("online.waiting");
    return;
  }
  const { lse, answer, delta, keys } = backwardOf(row.scores, row.values, upstream);
  const saved = { answer, lse, delta };
  byId("backward-saved").replaceChildren(
    ...Object.entries(saved).map(([name, value]) =>
      make("div", {}, says("dt", `backward.saved.${name}`), show(make("dd", { "data-saved": name }), value)),
    ),
  );
  const exact = softmax(row.scores);
  const done = Math.min(step * row.size, keys.length);
  const lines = keys.map((key, index) => {
    const computed = ["probability", "ofValue", "ofProbability", "ofScore"].map((name) =>
      index < done ? number(key[name]) : make("td", { class: "number" }, "–"),
    );
    const [probability, ...gradients] = computed;
    return [String(index), number(key.score), probability, number(exact[index]), ...gradients];
  });
  fill(byId("backward-table"), header, lines);
  const first = (step - 1) * row.size;
  byId("backward-table").querySelectorAll("tbody tr").forEach((line, index) => {
    line.classList.toggle("now", index >= first && index < done);
    line.classList.toggle("later", index >= done);
  });
  if (step === 0) status.textContent = text("backward.start");
  else if (done < keys.length) status.textContent = text("backward.status", { keys: keysOf({ first, last: done }) });
  else {
    const total = sum(keys.map((key) => key.ofScore));
    const size = sum(keys.map((key) => key.probability * Math.abs(key.ofProbability))) + Math.abs(delta);
    status.textContent = text("backward.end", { sum: format(Math.abs(total) <= 1e-12 * Math.max(1, size) ? 0 : total) });
  }
}

/** What recomputing costs at a real size, and what it saves. */
function drawPrice() {
  const { length, backward } = DATA.real.find((one) => one.length === PRICE_LENGTH);
  const line = (name, shown, value) => [
    text(`backward.price.${name}`),
    ...ALGORITHMS.map((algorithm) => number(value(backward[algorithm], algorithm), shown)),
  ];
  const elements = 2; // bytes of every number, as flashtile.lab counts
  const kept = { standard: length ** 2, flash1: 2 * length, flash2: length };
  fill(byId("price-table"), ["", ...heads(ALGORITHMS)], [
    line("kept", bytes, (_, algorithm) => kept[algorithm] * elements),
    line("traffic", bytes, ({ traffic }) => traffic),
    line("matmul", flops, ({ matmul }) => matmul),
  ]);
}

const flops = (count) => prefixed(count, "FLOP");
