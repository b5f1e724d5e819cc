// Which tiles a mask leaves to do. What is visited and what that costs comes from flashtile.lab.

function startSkipping() {
  let block = "4";
  const [select, range] = [byId("skipping-mask"), byId("skipping-window")];
  range.max = DATA.length - 1;
  range.value = 7;

  const found = () => DATA.skipping[block][select.value];
  const hasWindow = () => found().length > 1;

  function redraw() {
    const names = Object.keys(DATA.skipping[block]).map((name) => [name, text(`skipping.mask.${name}`)]);
    const first = select.value === "";
    choices(select, Object.fromEntries(names));
    if (first) select.value = "causal-window";
    radios(byId("skipping-block"), tileSizes(), block, (chosen) => {
      block = chosen;
      update();
    });
    update();
  }

  function update() {
    range.disabled = !hasWindow();
    byId("skipping-window-label").classList.toggle("disabled", range.disabled);
    byId("skipping-window-value").textContent = range.value;
    const one = found()[hasWindow() ? Number(range.value) : 0];
    byId("skipping-picture").replaceChildren(drawTiles(one, Number(block)));
    drawCosts(one, DATA.skipping[block].none[0]);
  }

  select.addEventListener("change", update);
  range.addEventListener("input", update);
  redraws.push(redraw);
}

/** Queries down, keys to the right: the tiles, and in each row the keys that are visible. */
function drawTiles({ tiles, lower, upper }, block) {
  const cell = 10;
  const across = DATA.length / block;
  const size = DATA.length * cell;
  const box = { viewBox: `-16 -16 ${size + 18} ${size + 18}`, class: "tiles", "aria-hidden": "true" };
  const root = draw("svg", box);
  const kinds = { f: "full", p: "partial", e: "empty" };
  [...tiles].forEach((letter, index) => {
    const at = { x: (index % across) * block * cell, y: Math.floor(index / across) * block * cell };
    const side = block * cell;
    root.append(draw("rect", { ...at, width: side, height: side, class: `tile ${kinds[letter]}` }));
  });
  for (let query = 0; query < DATA.length; query += 1) {
    const first = lower === null ? 0 : Math.max(0, query + lower);
    const last = upper === null ? DATA.length - 1 : Math.min(DATA.length - 1, query + upper);
    const run = { x: first * cell + 2, y: query * cell + 3, width: (last - first + 1) * cell - 4, height: cell - 6 };
    if (last >= first) root.append(draw("rect", { ...run, rx: 1.5, class: "visible" }));
  }
  root.append(
    draw("text", { x: size / 2, y: -5, class: "axis" }, text("skipping.keys")),
    draw("text", { x: -size / 2, y: -6, class: "axis", transform: "rotate(-90)" }, text("skipping.queries")),
  );
  return root;
}

function drawCosts(one, full) {
  const count = (letters) => [...one.tiles].filter((letter) => letters.includes(letter)).length;
  const [visited, partial, all] = [count("fp"), count("p"), one.tiles.length];
  const line = (name, value, whole) => [
    text(`skipping.${name}`),
    number(value, integer),
    number(whole, integer),
    number(value / whole, percent),
  ];
  fill(byId("skipping-table"), ["", text("skipping.with"), text("skipping.without"), text("skipping.share")], [
    line("visited", visited, all),
    line("tested", partial, all),
    line("bytes1", one.traffic[0], full.traffic[0]),
    line("bytes2", one.traffic[1], full.traffic[1]),
    line("matmul", one.matmul, full.matmul),
  ]);
  const values = { visited, all, skipped: all - visited, partial };
  byId("skipping-status").textContent = text("skipping.status", values);
}
