// The three algorithms on one clock: at every tick the memory has moved the same number of bytes for each.

const TICK = 128; // bytes
const SIDE = 104; // of the matrix in a picture
const ROOM = { left: 27, top: 27, right: 41, bottom: { forward: 14, backward: 27 } };
const [BAND, PITCH] = [8, 12]; // of the strips around it

// Where a matrix of N x d or N numbers stands beside the N x N one.
const PLACES = {
  Q: ["left", 0], dO: ["left", 1],
  K: ["top", 0], V: ["top", 1],
  O: ["right", 0], dQ: ["right", 1],
  l: ["right", 2], m: ["right", 2], LSE: ["right", 2], D: ["right", 2],
  dK: ["bottom", 0], dV: ["bottom", 1],
};
const STATISTICS = ["l", "m", "LSE", "D"]; // one strip for all of them
const GIVEN = { forward: ["Q", "K", "V"], backward: ["Q", "K", "V", "dO", "O", "l", "m", "LSE", "P"] };
const SQUARE = ["S", "P", "dP", "dS"];

/** What has happened after so many bytes: sums, the event that is going on, and how far it is. */
function progress(recording, moved) {
  let [done, read, written] = [0, 0, 0];
  for (const [index, event] of recording.events.entries()) {
    const [kind, , , , size] = event;
    const part = Math.min(size, moved - done);
    if (kind === "read") read += part;
    if (kind === "write") written += part;
    if (part < size) return { read, written, index, event, share: part / size, flops: event[5] };
    done += size;
  }
  const { matmul, other } = recording.counts;
  return { read, written, index: recording.events.length, event: null, share: 0, flops: matmul + other };
}

/** "reads K, rows 8–15"; the whole of a matrix needs no rows. */
function doing({ event }) {
  if (!event) return text("race.finished");
  const [kind, name, first, last] = event;
  if (last - first === DATA.length) return text(`race.${kind}`, { name });
  return text(`race.${kind}.rows`, { name, first, last: last - 1 });
}

/** A picture of one algorithm: the N x N matrix, and around it the others in strips. */
class MatrixPicture {
  constructor(direction) {
    const size = [ROOM.left + SIDE + ROOM.right, ROOM.top + SIDE + ROOM.bottom[direction]];
    const viewBox = [-ROOM.left, -ROOM.top, ...size].join(" ");
    this.direction = direction;
    this.root = draw("svg", { viewBox, "aria-hidden": "true", class: "matrix" });
  }

  /** Draw everything anew: a few hundred rectangles at most. */
  update(recording, state) {
    const { events } = recording;
    this.root.replaceChildren();
    this.add([0, 0, SIDE, SIDE], "outline");
    const tile = this.current(events, state);
    if (events.some(([kind]) => kind === "tile")) this.tiles(events, state, tile);
    else this.stored(events, state);
    const names = new Set(events.filter(([kind]) => kind !== "tile").map(([, name]) => name));
    const strips = [...names].filter((name) => name in PLACES);
    const statistics = strips.filter((name) => STATISTICS.includes(name));
    for (const name of strips) if (!STATISTICS.includes(name)) this.strip([name], events, state, tile);
    if (statistics.length) this.strip(statistics, events, state, tile);
  }

  add([x, y, width, height], style) {
    this.root.append(draw("rect", { x, y, width, height, class: style }));
  }

  /**
   * The tile that is on the chip: what is read up to it is for it, what is written is from the last. What is
   * read for a write without a tile between, as for δ, is for none.
   */
  current(events, { event, index }) {
    const isTile = ([kind]) => kind === "tile";
    if (!event) return undefined;
    if (event[0] === "write") return events.slice(0, index).findLast(isTile);
    const next = events.slice(index).find(([kind]) => kind !== "read");
    return next && isTile(next) ? next : undefined;
  }

  /** Matrices of N x N in the large memory: each darkens what it covers. */
  stored(events, state) {
    const present = this.direction === "backward" ? ["P"] : [];
    for (const [kind, name] of events.slice(0, state.index)) {
      if (kind === "write" && SQUARE.includes(name)) present.push(name);
    }
    for (const _ of present) this.add([0, 0, SIDE, SIDE], "stored");
    if (state.event && SQUARE.includes(state.event[1])) {
      if (state.event[0] === "write") this.add([0, 0, SIDE, SIDE * state.share], "stored");
      this.add([0, Math.min(state.share * SIDE, SIDE - 4), SIDE, 4], "moving");
    }
    const label = { x: SIDE / 2, y: SIDE / 2 + 6, class: "names" };
    this.root.append(draw("text", label, present.join(" ")));
  }

  /** Tiles come and go: those computed so far, and the one on the chip. */
  tiles(events, state, now) {
    const scale = SIDE / DATA.length;
    for (const [index, event] of events.entries()) {
      if (event[0] !== "tile") continue;
      const [top, bottom, left, right] = [event[2], event[3], event[6], event[7]].map((place) => place * scale);
      const style = event === now ? "now" : index < state.index ? "computed" : "ahead";
      this.add([left + 1, top + 1, right - left - 2, bottom - top - 2], `tile ${style}`);
    }
  }

  /** A matrix of N rows beside the square: what of it is in the large memory, what moves, what is on the chip. */
  strip(names, events, state, tile) {
    const [side, index] = PLACES[names[0]];
    const near = 3 + index * PITCH;
    const box = (first, last) => {
      const [start, length] = [(first / DATA.length) * SIDE, ((last - first) / DATA.length) * SIDE];
      if (side === "left") return [-near - BAND, start, BAND, length];
      if (side === "right") return [SIDE + near, start, BAND, length];
      if (side === "top") return [start, -near - BAND, length, BAND];
      return [start, SIDE + near, length, BAND];
    };
    const written = events.slice(0, state.index).filter(([kind, name]) => kind === "write" && names.includes(name));
    const given = names.some((name) => GIVEN[this.direction].includes(name));
    const present = given ? DATA.length : Math.max(0, ...written.map(([, , , last]) => last));
    if (present) this.add(box(0, present), "stored");
    this.add(box(0, DATA.length), "outline");
    const upright = side === "left" || side === "right";
    if (tile) this.add(box(...(upright ? tile.slice(2, 4) : tile.slice(6, 8))), "chip");
    if (state.event && names.includes(state.event[1])) this.add(box(...state.event.slice(2, 4)), "moving");
    this.root.append(this.label(names, side, near));
  }

  /** Names stand where no other strip is. */
  label(names, side, near) {
    const across = near + BAND - 1;
    const places = {
      left: { x: -near - BAND / 2, y: -4 },
      top: { x: SIDE + 7, y: -near },
      right: { x: SIDE + near + BAND / 2, y: SIDE + 9 },
      bottom: { x: -9, y: SIDE + across },
    };
    if (STATISTICS.includes(names[0])) {
      return draw("text", { x: SIDE + across + 1, y: -4, class: "name end" }, names.join(" "));
    }
    return draw("text", { ...places[side], class: "name" }, names[0]);
  }
}

/** One algorithm: its picture, what it is doing, how far it is, and what it has moved. */
class Panel {
  constructor(algorithm, direction) {
    this.algorithm = algorithm;
    this.picture = new MatrixPicture(direction);
    this.title = make(direction === "forward" ? "h3" : "h4", { class: "title" }); // a level below the heading above
    this.doing = make("p", { class: "doing" });
    this.bar = make("div", { class: "bar" }, make("div"));
    this.counters = make("dl");
    const parts = [this.title, this.picture.root, this.doing, this.bar, this.counters];
    this.root = make("div", { class: "panel", "data-algorithm": algorithm }, ...parts);
  }

  /** Show the state after so many bytes; `most` is the traffic of the algorithm that needs most. */
  update(recording, moved, most) {
    const state = progress(recording, moved);
    const { traffic } = recording.counts;
    this.picture.update(recording, state);
    this.title.replaceChildren(...heads([this.algorithm]));
    this.doing.textContent = doing(state);
    this.doing.classList.toggle("finished", !state.event);
    // as long as all its bytes, filled with those that have moved
    this.bar.style.width = `${(100 * traffic) / most}%`;
    this.bar.firstChild.style.width = `${(100 * Math.min(moved, traffic)) / traffic}%`;
    const counters = ["read", "written", "flops"].map((name) => {
      const value = show(make("dd"), state[name], integer);
      return make("div", {}, make("dt", {}, text(`race.counter.${name}`)), value);
    });
    this.counters.replaceChildren(...counters);
  }
}

/** The figure of one direction: block sizes, the clock, a panel for each algorithm, and the totals. */
function startRace(root, direction) {
  let block = "8";
  const fieldset = make("fieldset", { class: "radios", id: `${direction}-block` });
  const stepperRoot = make("div");
  const clock = make("p", { class: "clock", "aria-hidden": "true" });
  const status = make("p", { class: "unseen", role: "status" });
  const around = make("p", { class: "hint" });
  const legend = make("ul", { class: "legend" });
  const table = make("table");
  const panels = ALGORITHMS.map((algorithm) => new Panel(algorithm, direction));
  const row = make("div", { class: "panels" }, ...panels.map((panel) => panel.root));
  root.append(make("div", { class: "controls" }, fieldset), stepperRoot, clock, row, around, legend, status, table);

  const recordingOf = (algorithm) => DATA.race[direction][algorithm][block];
  const mostBytes = () => Math.max(...ALGORITHMS.map((algorithm) => recordingOf(algorithm).counts.traffic));

  function change(step) {
    const moved = step * TICK;
    for (const panel of panels) panel.update(recordingOf(panel.algorithm), moved, mostBytes());
    const said = Object.fromEntries(panels.map((panel) => [panel.algorithm, panel.doing.textContent]));
    clock.innerHTML = text("race.moved", { bytes: `<b>${integer(moved)}</b>` });
    status.textContent = text("race.status", { bytes: integer(moved), ...said });
  }

  const stepper = new Stepper(stepperRoot, { label: "race.clock", status, interval: 90, change });

  function redraw() {
    fieldset.replaceChildren(make("legend", {}, text("block")));
    radios(fieldset, tileSizes(), block, (chosen) => {
      block = chosen;
      redraw();
      fieldset.querySelector(":checked").focus();
    });
    around.textContent = text(`race.around.${direction}`);
    const kinds = ["stored", "moving", "chip", "computed"].map((name) =>
      make("li", {}, make("span", { class: `swatch ${name}` }), ` ${text(`race.legend.${name}`)}`),
    );
    legend.replaceChildren(...kinds);
    table.setAttribute("aria-label", text("race.table"));
    totals(table, (algorithm) => recordingOf(algorithm).counts);
    const last = Math.ceil(mostBytes() / TICK);
    stepper.resize(last, stepper.last ? undefined : Math.round(last / 5)); // at first something is going on
  }
  redraws.push(redraw);
}

/** A table of everything counted, an algorithm to a column. */
function totals(table, countsOf) {
  const line = (name, shown, value) => [
    text(`race.total.${name}`),
    ...ALGORITHMS.map((algorithm) => {
      const found = value(countsOf(algorithm));
      return found === null ? make("td", { class: "number" }, "–") : number(found, shown);
    }),
  ];
  const traffic = countsOf("standard").traffic;
  fill(table, ["", ...heads(ALGORITHMS)], [
    line("read", integer, ({ read }) => read),
    line("written", integer, ({ written }) => written),
    line("share", percent, (counts) => counts.traffic / traffic),
    line("chip", integer, (counts) => counts.on_chip || null),
    line("scratch", integer, ({ intermediate }) => intermediate),
    line("matmul", integer, ({ matmul }) => matmul),
    line("other", integer, ({ other }) => other),
  ]);
}

/** Traffic at real sizes. */
function drawReal() {
  fill(
    byId("real-table"),
    [text("race.real.length"), ...heads(ALGORITHMS)],
    DATA.real.map(({ length, forward }) => [
      integer(length),
      ...ALGORITHMS.map((algorithm) => number(forward[algorithm].traffic, bytes)),
    ]),
  );
}
