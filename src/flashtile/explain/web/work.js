// How work is split: over the multiprocessors of a GPU, and over the warps of a thread block.

const WARPS = 4;
const WARP_HEAD_DIM = 64;
const FIELDS = ["batch", "heads", "length", "block"];

/** Thread blocks, and how they fill a card that takes one on each multiprocessor. */
function occupancy(algorithm, { batch, heads, length, block }, places) {
  const threadBlocks = batch * heads * (algorithm === "flash2" ? Math.ceil(length / block) : 1);
  const rounds = Math.ceil(threadBlocks / places);
  const last = threadBlocks - (rounds - 1) * places;
  return { threadBlocks, rounds, last, first: Math.min(1, threadBlocks / places), mean: threadBlocks / (rounds * places) };
}

function startWork() {
  const inputs = FIELDS.map((name) => byId(`work-${name}`));
  const card = byId("work-card");

  function update() {
    const wrong = inputs.filter((input) => {
      const bad = !/^\d+$/.test(input.value) || Number(input.value) < Number(input.min) || Number(input.value) > Number(input.max);
      mark(input, bad, "work-error");
      return bad;
    });
    const error = byId("work-error");
    error.textContent = wrong
      .map((input) => text("work.error", { name: text(input.id.replace("-", ".")), most: integer(Number(input.max)) }))
      .join(" ");
    const numbers = Object.fromEntries(FIELDS.map((name) => [name, Number(byId(`work-${name}`).value)]));
    drawWork(wrong.length ? null : numbers, DATA.multiprocessors[card.value]);
  }

  function redraw() {
    const cards = Object.entries(DATA.multiprocessors).map(([name, places]) => [
      name,
      `${name.toUpperCase()} (${places})`,
    ]);
    choices(card, Object.fromEntries(cards));
    update();
  }
  for (const control of [...inputs, card]) control.addEventListener("input", update);
  byId("work-direction").addEventListener("input", update);
  redraws.push(redraw);
}

function drawWork(numbers, places) {
  const header = ["", ...heads(["flash1", "flash2"])];
  if (!numbers) {
    fill(byId("work-table"), header, []);
    byId("work-pictures").replaceChildren();
    byId("work-warps").replaceChildren();
    byId("work-status").textContent = text("online.waiting");
    return;
  }
  const found = ["flash1", "flash2"].map((algorithm) => occupancy(algorithm, numbers, places));
  const line = (name, shown, value) => [text(`work.${name}`), ...found.map((one) => number(value(one), shown))];
  fill(byId("work-table"), header, [
    line("threadBlocks", integer, (one) => one.threadBlocks),
    line("rounds", integer, (one) => one.rounds),
    line("first", percent, (one) => one.first),
    line("mean", percent, (one) => one.mean),
  ]);
  const pictures = found.map((one, index) => {
    const caption = make("figcaption", {}, text(`flash${index + 1}.name`));
    const rounds = [["work.first.round", Math.min(one.threadBlocks, places)]];
    if (one.rounds > 1) rounds.push(["work.last.round", one.last]);
    const drawn = rounds.map(([key, busy]) =>
      make("div", {}, make("p", { class: "small" }, text(key, { busy, places })), drawPlaces(busy, places)),
    );
    return make("figure", {}, caption, ...drawn);
  });
  byId("work-pictures").replaceChildren(...pictures);
  byId("work-status").textContent = text("work.status", {
    first: percent(found[0].mean),
    second: percent(found[1].mean),
    unit: text(byId("work-direction").value === "forward" ? "work.queries" : "work.keys"),
  });
  byId("work-warps").replaceChildren(drawWarps("flash1", numbers.block), drawWarps("flash2", numbers.block));
}

/** A square for each multiprocessor; those at work are filled. */
function drawPlaces(busy, places) {
  const across = 18;
  const rows = Math.ceil(places / across);
  const root = draw("svg", { viewBox: `0 0 ${across * 10} ${rows * 10}`, class: "places", "aria-hidden": "true" });
  for (let index = 0; index < places; index += 1) {
    const at = { x: (index % across) * 10 + 1, y: Math.floor(index / across) * 10 + 1, width: 8, height: 8, rx: 1 };
    root.append(draw("rect", { ...at, class: index < busy ? "busy" : "idle" }));
  }
  return root;
}

/** A tile of scores, split among the warps, and the outputs that they get from it. */
function drawWarps(algorithm, block) {
  const root = draw("svg", { viewBox: "0 0 240 124", class: "warps", "aria-hidden": "true" });
  const label = (x, y, content) => root.append(draw("text", { x, y, class: "name" }, content));
  const piece = (warp, x, y, width, height) => {
    root.append(draw("rect", { x, y, width, height, class: `warp warp${warp}` }));
    label(x + width / 2, y + height / 2 + 3, String(warp + 1));
  };
  const byKeys = algorithm === "flash1";
  label(56, 11, "P");
  label(byKeys ? 178 : 158, 11, "O");
  label(125, 69, "→");
  for (let warp = 0; warp < WARPS; warp += 1) {
    if (byKeys) {
      piece(warp, 6 + warp * 25, 16, 25, 100);
      piece(warp, 138 + warp * 25, 16, 16, 100);
      if (warp) label(133 + warp * 25 + 0.5, 69, "+");
    } else {
      piece(warp, 6, 16 + warp * 25, 100, 25);
      piece(warp, 142, 16 + warp * 25, 32, 25);
    }
  }
  const exchanged = byKeys ? WARPS * block * WARP_HEAD_DIM : 0;
  const shown = show(make("b", { "data-exchanged": algorithm }), exchanged, integer);
  return make(
    "figure",
    {},
    make("figcaption", {}, text(`${algorithm}.name`)),
    root,
    make("p", { class: "small" }, text(`work.warps.${algorithm}`)),
    make("p", { class: "small" }, `${text("work.warps.exchanged", { rows: integer(block), dim: WARP_HEAD_DIM })} `, shown),
  );
}
