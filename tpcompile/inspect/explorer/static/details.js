"use strict";
// The panel with everything known about a value: its type, its readers, its source, and why.

function showValue(stage, name) {
  const found = Stages.find(stage, name);
  if (!found) return showGone(stage, name);
  const { line, layer } = found;
  const { c } = stage;
  const pass = stage.data.name;
  const text = Stages.filled(line.text, layer);
  const readers = Stages.readers(stage, name);
  Explorer.details(
    element("h2", { class: "mono" }, `%${name}`),
    element("p", { class: "quiet" }, `after ${pass}, ${stage.compilation.name}`),
    element("pre", { class: "wrapped" }, linkedText(text, c, pass)),
    element("p", {}, placementWords(line)),
    expressionOf(stage, found, name),
    line.op === "input" ? element("p", {}, "An input: the caller passes it.") : null,
    line.operands.length ? [element("h3", {}, "Operands"), valueList(Stages.operands(found), c, pass)] : null,
    element("h3", {}, `Readers (${readers.filter(Boolean).length})`),
    readers.every((reader) => reader === "") && readers.length ? null : valueList(readers.filter(Boolean), c, pass),
    readers.includes("") ? element("p", {}, "It is a result of the graph.") : null,
    why(stage, found, name),
    errorsOf(c, name),
    originOf(line, layer),
    line.parameter ? recipeOf(line, layer) : null,
    line.cost ? costOf(line) : null,
  );
}

function showGone(stage, name) {
  for (let s = stage.s; s > 0; s--) {
    if (!Stages.find(Stages.at(stage.c, s - 1), name)) continue;
    const [fate, next] = Stages.fate(stage.c, s, name);
    const pass = Stages.at(stage.c, s).data.name;
    return Explorer.details(
      element("h2", { class: "mono" }, `%${name}`),
      element("p", {}, `It is gone: ${pass} `, fateWords(fate),
        next ? Explorer.link(`%${next}`, { node: next, c: stage.c, pass }, { class: "value" }) : "."));
  }
  Explorer.details(element("h2", { class: "mono" }, `%${name}`), element("p", {}, "No stage has this value."));
}

function fateWords(fate) {
  return { replaced: "replaced it by ", fused: "fused it into ", dropped: "dropped it" }[fate] || "";
}

function valueList(names, c, pass) {
  if (!names.length) return element("p", { class: "quiet" }, "none");
  return element("ul", { class: "values" }, [...new Set(names)].map((name) =>
    element("li", {}, Explorer.link(`%${name}`, { node: name, c, pass }, { class: "value" }))));
}

function placementWords(line) {
  const { kind, text, dim, axis } = line.place;
  if (kind === "Replicate") return `${text}: every rank holds the whole value.`;
  if (kind === "Partial") return `${text}: each rank holds a term; the value is their sum.`;
  if (kind === "Shard") return `${text}: each rank holds its part of dimension ${dim}, the axis ${axis}.`;
  return kind === "several" ? "Several tensors." : "";
}

// Explain the placement of a value, and where it comes from: pass by pass, and by which rule.
function why(stage, found, name) {
  const { c } = stage;
  const needs = Stages.needs(stage, name);
  const steps = Stages.history(stage, name);
  const told = steps.map((step) => {
    const pass = Stages.at(c, step.s).data.name;
    const link = Explorer.link(pass, { view: "pipeline", pass, node: step.name, c });
    if (step.what === "captured") return [link, ": captured from the model."];
    return [link, ": ", stepWords(step), proofWords(c, step), step.change?.terms.length ? "" : "."];
  });
  return [
    element("h3", {}, "Why"),
    ruleWords(stage, found),
    needs.length ? [
      element("p", {}, "This collective is needed: without it, its readers would break their own rules."),
      element("ul", {}, needs.map((need) => {
        const { reader } = need;
        return element("li", {},
          need.rule === "result" ? "the result of the graph"
            : Explorer.link(`%${reader}`, { node: reader, c, pass: stage.data.name }, { class: "value" }),
          ` (rule ${need.rule}): found ${need.got}; expected ${need.expected}`);
      })),
    ] : null,
    element("ol", { class: "history" }, told.map((one) => element("li", {}, one))),
    otherPasses(stage, steps),
    pastOf(stage, name).some(({ what }) => what === "fused")
      ? element("p", {}, "The collective in it: ", makerWords(stage, name, new Map()), ".") : null,
  ];
}

function stepWords(step) {
  switch (step.what) {
    case "inserted": return "inserted";
    case "made of several values":
      return ["made of ", step.parts.map((part, n) => [n ? ", " : "", element("code", {}, `%${part}`)])];
    case "replaced":
      return ["replaced ", element("code", {}, Stages.filled(step.was.line.op, null)), " by ",
        element("code", {}, step.line.op), placeChange(step)];
    case "changed": return ["changed its operands or its type", placeChange(step)];
    default: return "kept it";
  }
}

function placeChange(step) {
  if (!step.was || !step.line) return "";
  const [old, now] = [step.was.line.place.text || "none", step.line.place.text || "none"];
  return old === now ? "" : `; ${old} became ${now}`;
}

// Say which rule inferred the placement, from which operands.
function ruleWords(stage, found) {
  const { line } = found;
  if (line.op === "param")
    return element("p", {}, "The placement of a parameter is chosen by a pass, from the layouts of the plan.");
  if (!line.rule) return null;
  const [rule, file, number] = line.rule;
  const operands = Stages.operands(found).map((name) => Stages.find(stage, name)).filter(Boolean);
  const words = operands.map((one) => {
    return [element("code", {}, `%${Stages.filled(one.line.name, one.layer)}`), ` ${one.line.place.text || "none"}, `];
  });
  return element("p", {}, "The rule ", element("code", {}, rule), ` of ${line.op} (${file}:${number}) infers the type from `,
    words, "and nothing else.");
}

// Show the line of the Hugging Face model that a value comes from, with its neighbours.
function originOf(line, layer) {
  if (!line.origin) return null;
  const [module, file, number] = line.origin;
  const source = Explorer.data.sources[file];
  const where = [Stages.filled(module, layer), file ? `${file}:${number}` : ""].filter(Boolean).join(" ");
  const parts = [element("h3", {}, "Source"), element("p", { class: "mono" }, where)];
  if (source) {
    const lines = source.split("\n");
    const first = Math.max(0, number - 4);
    parts.push(element("pre", {}, lines.slice(first, number + 3).map((text, place) =>
      element("span", { class: first + place + 1 === number ? "code here" : "code" }, `${first + place + 1}  ${text}`))));
  }
  return parts;
}

// Show the bytes of checkpoint tensors that each rank reads.
function recipeOf(line, layer) {
  const { recipe, ranks } = line.parameter;
  const rows = ranks.flatMap((own, rank) => own.reads.map((read, place) => {
    const runs = read.count > 1 ? `${count(read.count, "run")} of ${formatBytes(read.bytes)}, every ${formatBytes(read.stride)}`
      : `${formatBytes(read.bytes)}`;
    const end = read.start + (read.count - 1) * read.stride + read.bytes;
    return [place ? "" : ranks.length > 1 ? `rank ${rank}` : "every rank",
      element("code", {}, Stages.filled(read.tensor, layer)),
      `${read.start.toLocaleString("en")} to ${end.toLocaleString("en")}`, runs];
  }));
  return [
    element("h3", {}, "Made of checkpoint bytes"),
    element("p", { class: "mono" }, Stages.filled(recipe, layer)),
    table(["rank", "tensor", "bytes of the tensor, end excluded", "size"], rows, { class: "reads" }),
  ];
}

function costOf(line) {
  const rows = line.cost.map(([flops, memory, wire], rank) => [
    line.cost.length > 1 ? `rank ${rank}` : "every rank", flops.toLocaleString("en"), formatBytes(memory), formatBytes(wire)]);
  return [element("h3", {}, "Cost per token"), table(["rank", "operations", "memory", "sent to others"], rows)];
}
