// The source of FlashAttention-2's forward pass, line by line, on the row of part 2.

const VARIABLES = ["S", "m_new", "P", "from_old", "l_i", "O_i", "m_i", "out", "lse"];

/** The lines that run, in order: the name of each, and what it assigns. */
function execution(scores, values, size) {
  const lines = [["length"], ["out"], ["lse"], ["rows"], ["loadQuery"]];
  lines.push(["freshOutput", { O_i: 0 }], ["freshStatistics", { l_i: 0, m_i: -Infinity }]);
  const steps = onlineSteps(scores, values, size);
  for (const one of steps) {
    const keys = keysOf(one);
    lines.push(
      ["columns", {}, { keys }],
      ["visits"],
      ["loadKeys", {}, { keys }],
      ["scores", { S: one.scores }],
      ["resident"],
      ["mask"],
      ["newMax", { m_new: one.max }],
      ["weights", { P: one.weights }],
      ["factor", { from_old: one.rescale }],
      ["rowSum", { l_i: one.total }],
      ["dropout"],
      ["output", { O_i: one.unnormalised }],
      ["rowMax", { m_i: one.max }],
    );
  }
  const { answer, max, total } = steps.at(-1);
  lines.push(["columns", {}, {}, "columnsEnd"], ["storeOutput", { out: answer }]);
  lines.push(["storeLse", { lse: max + Math.log(total) }], ["rows", {}, {}, "rowsEnd"], ["return"]);
  return lines.map(([line, assigned = {}, said = {}, key = line]) => ({ line, assigned, said, key }));
}

function startCode() {
  const elements = DATA.code.source.map(drawLine);
  byId("code-source").append(...elements);
  let lines = [];
  const stepper = new Stepper(byId("code-stepper"), {
    label: "code.stepper",
    status: byId("code-status"),
    interval: 700,
    change: drawStep,
  });

  function drawStep(step) {
    const now = lines[step];
    for (const element of elements) {
      element.classList.remove("now");
      element.removeAttribute("aria-current");
    }
    const known = Object.assign({}, ...lines.slice(0, step + 1).map(({ assigned }) => assigned));
    const rows = VARIABLES.map((name) => variable(name, known[name], name in (now?.assigned ?? {})));
    fill(byId("code-values"), [text("code.variable"), text("code.value")], rows);
    for (const line of byId("code-values").querySelectorAll("tbody tr")) {
      line.classList.toggle("now", line.querySelector(".changed") !== null);
    }
    byId("code-status").textContent = now ? text(`code.${now.key}`, now.said) : text("online.waiting");
    if (!now) return;
    const current = elements[DATA.code.lines[now.line]];
    current.classList.add("now");
    current.setAttribute("aria-current", "step");
    requestAnimationFrame(() => bringIntoView(current)); // measured once a frame, not for each step
  }

  function redraw() {
    lines = row.error ? [] : execution(row.scores, row.values, row.size);
    const shown = row.error ? "–" : list(row.scores);
    byId("code-row").textContent = text("code.row", { scores: shown, size: row.size });
    if (row.error) stepper.move(stepper.step);
    else stepper.resize(lines.length - 1);
  }
  row.changed.push(redraw);
}

/** Bring a line into view within its box, and leave the page where it is. */
function bringIntoView(line) {
  const box = byId("code-source");
  const [top, bottom] = [line.offsetTop, line.offsetTop + line.offsetHeight];
  if (top < box.scrollTop || bottom > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
}

function variable(name, value, changed) {
  const cell = make("td", { class: changed ? "number changed" : "number", "data-variable": name });
  if (value === undefined) return [make("code", {}, name), clear(cell)];
  cell.textContent = Array.isArray(value) ? list(value) : format(value);
  cell.dataset.value = Array.isArray(value) ? value.join(" ") : String(value);
  return [make("code", {}, name), cell];
}

/** A line of the source; one that is too long goes on further in. */
function drawLine(pieces) {
  const line = pieces.map(([, content]) => content).join("");
  const indent = line.length - line.trimStart().length;
  const element = make("div", { class: "line", style: `--indent: ${indent}` });
  let skip = indent;
  for (const [kind, content] of pieces) {
    const shown = content.slice(skip);
    skip = Math.max(0, skip - content.length);
    if (shown) element.append(kind ? make("span", { class: kind }, shown) : shown);
  }
  if (!line) element.append(" ");
  return element;
}
