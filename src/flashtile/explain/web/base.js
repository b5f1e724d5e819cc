// Texts, numbers and elements: what every part of the page uses.

const DATA = JSON.parse(document.getElementById("data").textContent);
const TEXTS = JSON.parse(document.getElementById("texts").textContent);
const ALGORITHMS = ["standard", "flash1", "flash2"];

let language = document.documentElement.lang;
const redraws = []; // of the parts, for when the language changes

const byId = (id) => document.getElementById(id);

/** The text of a key in the chosen language, with {name} replaced. */
function text(key, values = {}) {
  return TEXTS[key][language].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

const formatters = new Map(); // making one takes longer than using it

function written(number, options) {
  const key = language + JSON.stringify(options);
  if (!formatters.has(key)) formatters.set(key, Intl.NumberFormat(language, options));
  return formatters.get(key).format(number);
}

/** Text for people. Fewer digits than the number has: `show` keeps it whole beside what is shown. */
function format(number) {
  if (number === Infinity) return "∞";
  if (number === -Infinity) return "−∞";
  if (number === 0) return "0"; // −0, too
  const size = Math.abs(number);
  let options = { maximumSignificantDigits: 5, useGrouping: false };
  if (size < 1) options = { maximumFractionDigits: 5 };
  if (size >= 1e6 || (size < 1e-3 && size > 0)) options = { notation: "scientific", maximumFractionDigits: 3 };
  return written(number, options).replaceAll("-", "−");
}

const integer = (number) => written(number, { maximumFractionDigits: 0 });

const percent = (share) => written(share, { style: "percent", maximumFractionDigits: 1 });

/** Three digits and a decimal prefix, as in 19.3 MB. */
function prefixed(amount, unit) {
  const prefixes = ["", "k", "M", "G", "T"];
  let power = 0;
  while (amount >= 999.5 && power < prefixes.length - 1) {
    amount /= 1000;
    power += 1;
  }
  const digits = written(amount, { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
  return `${digits}\u00a0${prefixes[power]}${unit}`;
}

const bytes = (size) => prefixed(size, "B");

/** Put a number into an element: rounded as text, whole in data-value. */
function show(element, number, shown = format) {
  element.textContent = shown(number);
  element.dataset.value = String(number);
  return element;
}

/** Several numbers in one cell. */
const list = (numbers) => numbers.map(format).join("\u2003");

function clear(element) {
  element.textContent = "–";
  delete element.dataset.value;
  return element;
}

/** An element of HTML; children are elements or text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** An element of SVG. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** An element whose inside is one of the page's own texts, which may have markup. */
function says(tag, key) {
  const element = make(tag);
  element.innerHTML = text(key);
  return element;
}

/** Whether what an input holds is wrong, and which element says so (its id), if any. */
function mark(input, wrong, error) {
  input.setAttribute("aria-invalid", wrong);
  if (wrong && error) input.setAttribute("aria-describedby", error);
  else input.removeAttribute("aria-describedby");
}

/** Radio buttons inside a fieldset; `labels` is {value: label}. */
function radios(fieldset, labels, chosen, onChange) {
  for (const old of fieldset.querySelectorAll("label")) old.remove();
  for (const [value, label] of Object.entries(labels)) {
    const input = make("input", { type: "radio", name: fieldset.id, value });
    input.checked = value === chosen;
    input.addEventListener("change", () => onChange(value));
    fieldset.append(make("label", {}, input, label));
  }
}

/** The sizes of tiles to choose from. */
const tileSizes = () => Object.fromEntries(DATA.blocks.map((size) => [String(size), `${size} × ${size}`]));

/** Options of a select; what was chosen stays so. */
function choices(select, labels) {
  const chosen = select.value;
  select.replaceChildren(...Object.entries(labels).map(([value, label]) => make("option", { value }, label)));
  if (chosen in labels) select.value = chosen;
}

/** Rows of cells into a table: the first row and the first cell of each are headers. */
function fill(table, header, rows) {
  const head = make("tr", {}, ...header.map((cell) => named(cell, "col")));
  const body = rows.map((row) => make("tr", {}, named(row[0], "row"), ...row.slice(1)));
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

function named(cell, scope) {
  if (cell === "") return make("td");
  const header = make("th", { scope });
  header.append(cell);
  return header;
}

/** The names of algorithms, over columns. */
const heads = (algorithms) => algorithms.map((algorithm) => says("span", `${algorithm}.head`));

const number = (value, shown = format) => show(make("td", { class: "number" }), value, shown);

/** Every text of the markup in the chosen language. */
function translate() {
  document.documentElement.lang = language;
  for (const element of document.querySelectorAll("[data-text]")) element.innerHTML = text(element.dataset.text);
  for (const element of document.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", text(element.dataset.label));
  }
  for (const redraw of redraws) redraw();
}
