// The gradients of the row of part 2, from its LSE.

const BACKWARD_COLUMNS = ["key", "score", "probability", "exact", "ofValue", "ofProbability", "ofScore"];

function startBackward() {
  const input = byId("backward-upstream");
  const stepper = new Stepper(byId("backward-stepper"), {
    label: "backward.stepper",
    status: byId("backward-status"),
    interval: 1200,
    change: (step) => drawBackward(step, parseNumber(input.value)),
  });

  function redraw() {
    const upstream = parseNumber(input.value);
    input.setAttribute("aria-invalid", upstream === null);
    const error = upstream === null ? text("backward.error", { written: quoted(input.value) }) : "";
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
    status.textContent = text("backward.end", { sum: format(close(total, 0) ? 0 : total) });
  }
}

/** What recomputing costs at a real size, and what it saves. */
function drawPrice() {
  const real = DATA.real[1].backward;
  const line = (name, shown, value) => [
    text(`backward.price.${name}`),
    ...ALGORITHMS.map((algorithm) => number(value(real[algorithm], algorithm), shown)),
  ];
  const elements = 2; // bytes of a number
  const kept = { standard: DATA.real[1].length ** 2, flash1: 2 * DATA.real[1].length, flash2: DATA.real[1].length };
  fill(byId("price-table"), ["", ...heads(ALGORITHMS)], [
    line("kept", bytes, (_, algorithm) => kept[algorithm] * elements),
    line("traffic", bytes, ({ traffic }) => traffic),
    line("matmul", flops, ({ matmul }) => matmul),
  ]);
}

const flops = (count) => prefixed(count, "FLOP");
