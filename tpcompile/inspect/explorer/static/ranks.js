"use strict";
// Who holds what: a strip for each logical axis, bytes, collectives, and the module of each rank.

const WIDEST_STRIP = 860, RANK_HEIGHT = 20, LABEL_WIDTH = 60;

// Draw an axis: a row for each rank, with the units that it holds. Repeated units are hatched.
function axisStrip(axis, width) {
  const { units, parts } = axis;
  const holders = new Array(units).fill(0);
  for (const part of parts) for (const [start, stop] of part) for (let unit = start; unit < stop; unit++) holders[unit]++;
  const scale = (width - LABEL_WIDTH) / units;
  const height = parts.length * (RANK_HEIGHT + 3) + 18;
  const svg = element("svg:svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${axis.axis}: ${axisWords(axis).join("; ")}`,
  });
  parts.forEach((part, rank) => {
    const top = rank * (RANK_HEIGHT + 3);
    svg.append(element("svg:text", { x: 0, y: top + 14 }, `rank ${rank}`),
      element("svg:rect", { x: LABEL_WIDTH, y: top, width: units * scale, height: RANK_HEIGHT, class: "axis" }));
    for (const [start, stop] of part) {
      for (const [from, to] of runs(start, stop, (unit) => holders[unit] > 1)) {
        const repeated = holders[from] > 1;
        svg.append(element("svg:rect", {
          x: LABEL_WIDTH + from * scale, y: top, width: (to - from) * scale, height: RANK_HEIGHT, class: repeated ? "held repeated" : "held",
        }, element("svg:title", {}, `rank ${rank}: ${axis.axis} ${unitWords(from, to)}${repeated ? `, also on ${othersOf(axis, from, rank)}` : ""}`)));
      }
      if (units * 18 <= width - LABEL_WIDTH && axis.grain === 1)
        for (let unit = start; unit < stop; unit++)
          svg.append(element("svg:text", { x: LABEL_WIDTH + (unit + 0.5) * scale, y: top + 14, "text-anchor": "middle", class: "unit" }, unit));
    }
  });
  svg.append(element("svg:text", { x: LABEL_WIDTH, y: height - 2, class: "second" }, "0"),
    element("svg:text", { x: width, y: height - 2, "text-anchor": "end", class: "second" }, `${(units * axis.grain).toLocaleString("en")}`));
  return svg;
}

function runs(start, stop, key) {
  const found = [];
  for (let unit = start; unit < stop; unit++) {
    const last = found[found.length - 1];
    if (last && key(last[0]) === key(unit)) last[1] = unit + 1; else found.push([unit, unit + 1]);
  }
  return found;
}

function unitWords(from, to) {
  return to - from === 1 ? `${from}` : `${from} to ${to - 1}`;
}

function othersOf(axis, unit, rank) {
  const others = axis.parts.map((part, other) => part.some(([a, b]) => a <= unit && unit < b) && other !== rank ? other : -1).filter((n) => n >= 0);
  return `rank${others.length > 1 ? "s" : ""} ${others.join(", ")}`;
}

function axisWords(axis) {
  return axis.parts.map((part, rank) => `rank ${rank} holds ${part.map(([a, b]) => unitWords(a, b)).join(" and ")}`);
}

// Say which units several ranks hold, and why: the heads that read them.
function repeatWords(axis, queries) {
  const { one } = about(axis);
  const lines = [];
  axis.parts.forEach((part, rank) => {
    for (const [start, stop] of part)
      for (let unit = start; unit < stop; unit++) {
        const others = axis.parts.flatMap((other, n) => n !== rank && other.some(([a, b]) => a <= unit && unit < b) ? [n] : []);
        if (!others.length) continue;
        const group = queries && queries.units / axis.units;
        const readers = queries ? queries.parts[rank].flatMap(([a, b]) => Array.from({ length: b - a }, (_, n) => a + n))
          .filter((head) => Math.floor(head / group) === unit) : [];
        lines.push(`Rank ${rank} holds ${one} ${unit}, which ${othersOf(axis, unit, rank)} also ${others.length > 1 ? "hold" : "holds"}`
          + (readers.length ? `: its ${about(queries).one}${readers.length > 1 ? "s" : ""} ${readers.join(", ")} read${readers.length > 1 ? "" : "s"} it.` : "."));
      }
  });
  return lines;
}

function uneven(axis) {
  const sizes = axis.parts.map((part) => part.reduce((sum, [a, b]) => sum + (b - a) * axis.grain, 0));
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  return least === most ? `even: ${most.toLocaleString("en")} on each rank`
    : `uneven: from ${least.toLocaleString("en")} to ${most.toLocaleString("en")} per rank`;
}

// The titles of axes, what one unit is, and the axis of the heads that read it.
const AXES = {
  q_heads: { title: "Query heads", one: "query head" },
  kv_heads: { title: "KV heads", one: "KV head", readers: "q_heads" },
  linear_v_heads: { title: "Value heads of linear attention", one: "value head" },
  linear_k_heads: { title: "Key heads of linear attention", one: "key head", readers: "linear_v_heads" },
  ffn: { title: "MLP features (ffn)", one: "ffn" },
  experts: { title: "Experts, each whole on a rank", one: "expert" },
  expert_ffn: { title: "Features of each expert", one: "feature" },
  vocab: { title: "Vocabulary", one: "vocab" },
};

function about(axis) {
  return AXES[axis.axis] || { title: axis.axis, one: axis.axis };
}

function axesOf(axes, width) {
  return axes.map((axis) => {
    const { title, one, readers } = about(axis);
    const queries = readers ? axes.find((other) => other.axis === readers && other.layers === axis.layers) : null;
    const repeated = repeatWords(axis, queries);
    return element("section", { class: "axis" },
      element("h3", {}, `${title}: ${(axis.units * axis.grain).toLocaleString("en")}`,
        element("span", { class: "quiet" }, ` ${axis.grain > 1 ? `in units of ${axis.grain}, ` : ""}${uneven(axis)}${axis.layers ? `, ${axis.layers}` : ""}`)),
      axisStrip(axis, width),
      queries ? element("p", { class: "quiet" }, `${count(queries.units / axis.units, about(queries).one)} ${queries.units > axis.units ? "read" : "reads"} each ${one}, and a rank holds every ${one} that its ${about(queries).one}s read.`) : null,
      repeated.length ? element("ul", { class: "repeats" }, repeated.map((line) => element("li", {}, line))) : null);
  });
}

// The columns of the table of ranks. One that is 0 on all ranks is left out.
const SHARES = [
  ["query heads", (rank) => rank.q_heads],
  ["KV heads", (rank) => rank.kv_heads],
  ["ffn", (rank) => rank.ffn && rank.ffn.toLocaleString("en")],
  ["vocabulary", (rank) => rank.vocab.toLocaleString("en")],
  ["weights", (rank) => formatBytes(rank.weight_bytes)],
  ["KV cache per token", (rank) => rank.kv_bytes_per_token && formatBytes(rank.kv_bytes_per_token)],
  ["states per sequence", (rank) => rank.state_bytes_per_sequence && formatBytes(rank.state_bytes_per_sequence)],
  ["experts × features", (rank) => rank.experts && `${rank.experts} × ${rank.expert_ffn.toLocaleString("en")}`],
  ["weights of experts", (rank) => rank.expert_bytes && formatBytes(rank.expert_bytes)],
];

function rankBytes(plan) {
  const shown = SHARES.filter(([, cell]) => plan.ranks.some(cell));
  return scrolled("Shares of the ranks", table(["", ...shown.map(([title]) => title)],
    plan.ranks.map((rank) => [`rank ${rank.rank}`, ...shown.map(([, cell]) => cell(rank))]), { class: "shares" }));
}

const WAYS = { tp: "tp: a part of each expert", ep: "ep: whole experts" };

// Return the bytes of experts that the busiest rank reads with each way to share them.
function expertTable(plan) {
  const rows = plan.expert_plans.map((one) => [
    `${WAYS[one.plan]}${one.chosen ? " (chosen)" : ""}`,
    one.bytes_per_token === null ? "" : formatBytes(one.bytes_per_token), one.reason]);
  return rows.length ? scrolled("Ways to share experts",
    table(["way to share experts", "expected bytes per token, on the busiest rank", ""], rows, { class: "ways" })) : null;
}

// Return the bytes of each format of weights, if there are several.
function formatTable(plan) {
  const rows = Object.entries(plan.formats).map(([name, bytes]) => [name, formatBytes(bytes)]);
  return rows.length < 2 ? null : table(["format of weights", "bytes on all ranks"], rows);
}

const COLLECTIVE_OPS = ["tpc.redistribute", "tpc.all_reduce", "tpc.all_gather", "tpc.reduce_scatter"];

// Return what passes did to a collective, since it is one. A collective that was fused into a sum has
// its own past.
function pastOf(stage, name) {
  const steps = Stages.history(stage, name).filter(({ what }) => what !== "changed");
  const fused = steps.flatMap((step) => step.what === "captured" ? [] : Stages.parts(stage.c, step.s, step.name)
    .map((part) => [Stages.at(stage.c, step.s - 1), part])
    .filter(([earlier, part]) => COLLECTIVE_OPS.includes((Stages.find(earlier, part) || { line: {} }).line.op)));
  const own = steps.filter(({ line }) => line && COLLECTIVE_OPS.includes(line.op));
  if (!fused.length) return own.length ? own : steps;
  const [earlier, part] = fused[0];
  const later = steps.filter(({ s }) => s > earlier.s);
  return [...pastOf(earlier, part), ...later.map((step) => ({ ...step, what: "fused" }))];
}

// Return the passes that put a collective in: [{pass, what, name}]. Layers of one section are alike.
function makersOf(stage, name, known) {
  const found = Stages.find(stage, name);
  const layer = layerOfName(name);
  const key = `${found ? found.section.number : ""} ${layer === null ? name : name.replace(/^l\d+_/, "")}`;
  if (!known.has(key))
    known.set(key, pastOf(stage, name).map(({ s, what, name }) => (
      { pass: Stages.at(stage.c, s).data.name, what, name: generalName(name) })));
  return known.get(key).map((step) => ({ ...step, name: Stages.filled(step.name, layer) }));
}

function makerWords(stage, name, known) {
  return makersOf(stage, name, known).map(({ pass, what, name }, n) => [
    n ? ", " : "", Explorer.link(pass, { view: "pipeline", c: stage.c, pass, node: name }), ` (${what})`]);
}

function wireTable(plan, stage) {
  if (!plan.collectives.length) return element("p", {}, "One rank needs no collectives.");
  const whole = plan.collectives.reduce((sum, one) => sum + one.bytes_per_token, 0);
  const known = new Map();
  const rows = plan.collectives.map((one, n) => [
    n + 1, one.op, Explorer.link(`%${one.node}`, { node: one.node, c: stage.c, pass: stage.data.name }),
    one.bytes_per_token.toLocaleString("en"), makerWords(stage, one.node, known)]);
  return [
    element("p", {}, `${count(plan.collectives.length, "collective")}; each rank sends ${formatBytes(whole)} per token around a ring.`),
    element("div", { class: "scrolled", tabindex: 0, role: "region", "aria-label": "Collectives" },
      table(["", "collective", "value", "bytes that a rank sends per token", "put in by"], rows)),
  ];
}

function moduleOf(compilation, place) {
  const { modules } = compilation;
  if (!modules || !modules.length) return null;
  const rank = Math.min(Number(place.rank || 0), modules.length - 1);
  const same = modules[rank];
  const text = typeof same === "number" ? modules[same] : same;
  return [
    element("h2", {}, "Emitted module of ", element("select", { "aria-label": "Rank of the module", onchange: (event) => Explorer.go({ rank: event.target.value }) },
      modules.map((one, n) => element("option", { value: n, selected: n === rank }, `rank ${n}${typeof one === "number" ? `, the same as rank ${one}` : ""}`)))),
    element("pre", { class: "module", tabindex: 0, "aria-label": "Source of the module" }, text),
  ];
}

Explorer.view({
  name: "ranks",
  title: "Ranks",
  answers: "Which rank holds what? Heads, features, bytes, collectives, and the module of each rank.",
  available: () => (Explorer.data.compilations || []).some((one) => one.plan),
  find(words) {
    const topics = [...Object.values(AXES).map((one) => one.title), "Collectives", "Emitted module of each rank", "Weights and KV cache of each rank"];
    return topics.filter(matcher(words))
      .map((topic) => ({ kind: "Ranks", text: topic, place: { view: "ranks", node: "" } }));
  },
  show(root, place) {
    const usable = Stages.all().map((one, c) => [one, c]).filter(([one]) => one.plan);
    const [compilation, c] = usable.find(([, n]) => String(n) === place.c) || usable[0];
    const last = Stages.at(c, compilation.stages.length - 1);
    const picker = usable.length < 2 ? null : element("label", {}, "Pipeline ",
      element("select", { onchange: (event) => Explorer.go({ c: event.target.value, pass: "", node: "" }) },
        usable.map(([one, n]) => element("option", { value: n, selected: n === c }, one.name))));
    root.replaceChildren(...[picker, rankBytes(compilation.plan), expertTable(compilation.plan),
      formatTable(compilation.plan), axesOf(compilation.axes, Math.min(WIDEST_STRIP, root.clientWidth - 24)),
      element("h2", {}, "Collectives"), wireTable(compilation.plan, last),
      moduleOf(compilation, place)].flat(Infinity).filter(Boolean));
    if (place.node) showValue(last, place.node); else Explorer.details(overview(last));
  },
});
