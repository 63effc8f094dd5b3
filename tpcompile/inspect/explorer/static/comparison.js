"use strict";
// The comparison with Hugging Face eager: the error of every value down the layers.

const PLOT = { width: 980, height: 380, left: 70, right: 16, top: 14, bottom: 40 };
const FLOOR = 1e-12;

// Return the rows of values inside the graph with a finite error, in graph order.
function comparedRows(comparison) {
  return comparison.rows.filter((row) => row.error !== null && row.layer !== undefined);
}

function plotOf(comparison, place) {
  const rows = comparedRows(comparison);
  const values = rows.flatMap((row) => [row.error, row.limit]).filter((value) => value > FLOOR);
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  const x = (n) => PLOT.left + (n + 0.5) / rows.length * (PLOT.width - PLOT.left - PLOT.right);
  const y = (value) => {
    const part = (Math.log10(Math.max(value, 10 ** low)) - low) / Math.max(high - low, 1);
    return PLOT.height - PLOT.bottom - part * (PLOT.height - PLOT.top - PLOT.bottom);
  };
  const svg = element("svg:svg", {
    width: PLOT.width, height: PLOT.height, viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, class: "plot", role: "group",
    "aria-label": `Error of ${rows.length} values in ${comparison.dtype}, from 1e${low} to 1e${high}`,
  });
  for (let power = low; power <= high; power++)
    svg.append(element("svg:line", { x1: PLOT.left, x2: PLOT.width - PLOT.right, y1: y(10 ** power), y2: y(10 ** power), class: "grid" }),
      element("svg:text", { x: PLOT.left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, `${power === low ? "≤ " : ""}1e${power}`));
  let last = null, free = 0;
  rows.forEach((row, n) => {
    if (row.layer === null || row.layer === last) return;
    last = row.layer;
    if (x(n) < free) return;
    free = x(n) + 46;
    svg.append(element("svg:line", { x1: x(n), x2: x(n), y1: PLOT.top, y2: PLOT.height - PLOT.bottom, class: "grid" }),
      element("svg:text", { x: x(n), y: PLOT.height - PLOT.bottom + 16 }, `layer ${row.layer}`));
  });
  svg.append(element("svg:text", { x: PLOT.width / 2, y: PLOT.height - 6, "text-anchor": "middle" }, "values in the order of the graph"));
  const line = (key) => rows.map((row, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(row[key]).toFixed(1)}`).join("");
  svg.append(element("svg:path", { d: line("limit"), class: "limit" }), element("svg:path", { d: line("error"), class: "error" }));
  rows.forEach((row, n) => {
    const first = comparison.first_divergence && comparison.first_divergence.node === row.node;
    const kind = first ? "first" : row.ok ? "" : "wrong";
    if (!kind && rows.length > 1500 && n % 4 && place.node !== row.node) return;
    svg.append(element("svg:circle", {
      cx: x(n), cy: y(row.error), r: first ? 6 : place.node === row.node ? 5 : 2.5, class: `dot ${kind}${place.node === row.node ? " chosen" : ""}`,
      onclick: () => Explorer.go({ node: row.node }),
    }, element("svg:title", {}, `%${row.node}: error ${row.error.toExponential(1)}, limit ${row.limit.toExponential(1)}`)));
  });
  return svg;
}

// Return the values at which the error grows most: by how much it exceeds that of every operand.
function growths(comparison) {
  const rows = comparedRows(comparison);
  const errors = new Map(rows.map((row) => [row.node, row.error]));
  const stage = Stages.at(comparison.compilation, Stages.all()[comparison.compilation].stages.length - 1);
  const known = (name, depth) => {
    if (errors.has(name)) return errors.get(name);
    const found = depth ? Stages.find(stage, name) : null;
    return found ? Math.max(0, ...Stages.operands(found).map((operand) => known(operand, depth - 1))) : 0;
  };
  return rows.map((row) => {
    const found = Stages.find(stage, row.node);
    const before = found ? Math.max(0, ...Stages.operands(found).map((operand) => known(operand, 4))) : 0;
    return { row, before, growth: row.error - before };
  }).sort((a, b) => b.growth - a.growth);
}

function comparisonParts(comparison, place) {
  const first = comparison.first_divergence;
  const rows = comparedRows(comparison);
  const byLayer = new Map();
  for (const row of rows) {
    const worst = byLayer.get(row.layer);
    if (!worst || row.error / row.limit > worst.error / worst.limit) byLayer.set(row.layer, row);
  }
  const pass = Stages.at(comparison.compilation, Stages.all()[comparison.compilation].stages.length - 1).data.name;
  const link = (row) => Explorer.link(`%${row.node}`, { node: row.node, c: comparison.compilation, pass });
  const exponent = (value, digits = 1) => value === null ? "not finite" : value.toExponential(digits);
  return [
    element("h2", { id: `compared-${comparison.dtype}` }, `${Stages.all()[comparison.compilation].name}, ${comparison.dtype}: ${comparison.ok ? "equal within rounding" : "DIFFERENT"}`),
    element("p", {}, first ? ["First divergence: ", link(first), ` (${first.source}), ${first.problem || `error ${exponent(first.error)}, limit ${exponent(first.limit)}`}.`]
      : "No value diverges.", ` The next tokens are ${comparison.tokens_equal ? "the same" : "NOT the same"}.`),
    element("p", { class: "quiet" }, comparison.beside_fp32
      ? "The error is the distance from the values in fp32; the limit is that of Hugging Face's own rounding. Both are root mean squares, relative to the value."
      : "The error is the largest difference from eager, divided by the largest magnitude."),
    element("div", { class: "scrolled-x", tabindex: 0, role: "region", "aria-label": `Plot of the errors in ${comparison.dtype}` }, plotOf(comparison, place)),
    element("p", { class: "legend" }, element("span", { class: "chip error-key" }, "error"), element("span", { class: "chip limit-key" }, "limit")),
    element("h3", {}, `Where the error grows most in ${comparison.dtype}`),
    element("p", { class: "quiet" }, "Growth is the error of a value less the largest error of its operands. The plot is logarithmic, so small errors look as if they grow fast."),
    scrolled("Growth of errors", table(["value", "source", "error of its operands", "its error", "growth"], growths(comparison).slice(0, 8).map(({ row, before, growth }) => [
      link(row), row.source, exponent(before, 2), exponent(row.error, 2), exponent(growth, 2)]))),
    element("h3", {}, "The value nearest to its limit, by layer"),
    scrolled("Errors by layer", table(["layer", "value", "error", "limit", ""], [...byLayer].map(([layer, row]) => [
      layer === null ? "outside" : layer, link(row), exponent(row.error), exponent(row.limit), row.ok ? "ok" : row.problem || "DIFFERS"]))),
  ];
}

// Return the errors of a value in each dtype that it was compared in.
function errorsOf(c, name) {
  const rows = (Explorer.data.comparisons || []).filter((one) => one.compilation === c)
    .flatMap((one) => comparedRows(one).filter((row) => row.node === name).map((row) => [one.dtype, row]));
  if (!rows.length) return null;
  return [element("h3", {}, "Error against eager"), table(["dtype", "error", "limit"],
    rows.map(([dtype, row]) => [dtype, row.error.toExponential(2), row.limit.toExponential(2)]))];
}

// Make a button for each comparison, which scrolls to it.
function jumps() {
  const { comparisons } = Explorer.data;
  if (comparisons.length < 2) return null;
  return element("p", {}, "Go to ", comparisons.map(({ dtype }) => element("button", {
    type: "button", onclick: () => document.getElementById(`compared-${dtype}`).scrollIntoView(),
  }, dtype)));
}

Explorer.view({
  name: "compare",
  title: "Compare",
  answers: "Does it compute what Hugging Face computes? The error of every value, and where it grows.",
  needs: "add --compare",
  available: () => Boolean(Explorer.data.comparisons && Explorer.data.comparisons.length),
  find(words) {
    const short = { float32: "fp32", bfloat16: "bf16", float16: "fp16" };
    return Explorer.data.comparisons.map(({ dtype }) => `Errors of all values in ${dtype} (${short[dtype] || dtype})`)
      .filter(matcher(words))
      .map((text) => ({ kind: "Compare", text, place: { view: "compare", node: "" } }));
  },
  show(root, place) {
    root.replaceChildren(...[jumps(), ...Explorer.data.comparisons.flatMap((one) => comparisonParts(one, place))].filter(Boolean));
    const { compilation } = Explorer.data.comparisons[0];
    const last = Stages.at(compilation, Stages.all()[compilation].stages.length - 1);
    if (place.node) showValue(last, place.node); else Explorer.details(overview(last));
  },
});
