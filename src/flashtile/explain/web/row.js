// One row of attention: the recurrence of flashtile.lab.online, for scores that the reader edits.

const MOST_KEYS = 8;
const LARGEST = { score: 1e300, value: 1e150 }; // sums of scores and products of two values do not overflow
const THOUSANDS = /\b[1-9]\d{0,2}(,\d{3})+(?!\d)/; // or decimals: 1,000 has two readings, 0,125 and 1,5 have one

/**
 * A number as people write it: 0.5, 0,5, ln 3, -inf for a score that hides its key. `kind` is that of `LARGEST`.
 * `value` is null for anything else; `why` then says more, where there is more to say.
 */
function parseNumber(written, kind) {
  const plain = written.trim().toLowerCase().replaceAll("−", "-");
  if (kind === "score" && ["-inf", "-infinity", "-∞"].includes(plain)) return { value: -Infinity };
  if (THOUSANDS.test(plain)) return { value: null, why: text("number.comma") };
  const value = valueOf(plain.replace(",", "."));
  if (value === null || Math.abs(value) <= LARGEST[kind]) return { value };
  return { value: null, why: text("number.large", { largest: String(LARGEST[kind]).replace("+", "") }) };
}

/** A number or ln of one; null for anything else. */
function valueOf(plain) {
  const found = /^(ln\s*\(?\s*)?([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(\s*\))?$/.exec(plain);
  if (!found || (found[3] && !found[1]?.includes("(")) || (found[1]?.includes("(") && !found[3])) return null;
  const number = Number(found[2]);
  if (!found[1]) return number;
  return number > 0 ? Math.log(number) : null;
}

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
const dot = (left, right) => sum(left.map((one, index) => one * right[index]));
const parts = (length, size) =>
  Array.from({ length: Math.ceil(length / size) }, (_, index) => [
    index * size,
    Math.min((index + 1) * size, length),
  ]);

/** The state after each block of keys: m, l, u, and how they came about. */
function onlineSteps(scores, values, size) {
  let [max, total, unnormalised] = [-Infinity, 0, 0];
  return parts(scores.length, size).map(([first, last]) => {
    const before = { max, total, unnormalised };
    const seen = scores.slice(first, last);
    max = Math.max(max, ...seen);
    const reference = max === -Infinity ? 0 : max; // no key is visible yet
    const rescale = Math.exp(before.max - reference);
    const weights = seen.map((score) => Math.exp(score - reference));
    total = rescale * total + sum(weights);
    unnormalised = rescale * unnormalised + dot(weights, values.slice(first, last));
    const answer = total > 0 ? unnormalised / total : 0;
    return { first, last, before, scores: seen, weights, rescale, max, total, unnormalised, answer };
  });
}

/** softmax(scores), all at once; zeros where no key is visible. */
function softmax(scores) {
  const max = Math.max(...scores);
  if (max === -Infinity) return scores.map(() => 0);
  const exponentials = scores.map((score) => Math.exp(score - max));
  const total = sum(exponentials);
  return exponentials.map((one) => one / total);
}

const attention = (scores, values) => dot(softmax(scores), values);

/** What averaging the blocks' own results gives, which is wrong. */
function meanOfBlocks(scores, values, size) {
  const results = parts(scores.length, size).map(([first, last]) =>
    attention(scores.slice(first, last), values.slice(first, last)),
  );
  return sum(results) / results.length;
}

/** The gradients of a row from its LSE alone, and what is needed on the way. */
function backwardOf(scores, values, upstream) {
  const { max, total, answer } = onlineSteps(scores, values, scores.length)[0];
  const lse = max + Math.log(total);
  const delta = upstream * answer;
  const keys = scores.map((score, index) => {
    const probability = Math.exp(score - (lse === -Infinity ? 0 : lse));
    const ofProbability = upstream * values[index];
    return {
      score,
      probability,
      ofProbability,
      ofScore: probability * (ofProbability - delta),
      ofValue: probability * upstream,
    };
  });
  return { lse, answer, delta, keys };
}

/** The row that parts 2, 4 and 6 share. `error` says what is wrong with what was typed; then there is no row. */
const row = {
  written: [],
  scores: [],
  values: [],
  size: 2,
  error: null,
  changed: [],
  notify(step) {
    for (const redraw of this.changed) redraw(step);
  },
};

const PRESETS = {
  example: { scores: ["0", "0", "ln 3", "ln 3"], values: ["0", "0", "1", "1"] },
  rising: { scores: ["-1", "0.5", "2", "1", "3", "2.5"], values: ["1", "-2", "0.5", "3", "-1", "2"] },
  hidden: { scores: ["-inf", "-inf", "1", "-inf", "0", "2"], values: ["5", "-4", "1", "7", "2", "3"] },
  large: { scores: ["1000", "1001", "-1000", "1002"], values: ["1", "2", "3", "4"] },
};
