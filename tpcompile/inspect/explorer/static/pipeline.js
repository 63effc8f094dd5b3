"use strict";
// The passes in order, and one of them before and after, side by side. Lines are matched by what
// became of the values, not by their text.

const CONTEXT = 2;      // unchanged lines that stay visible around a change

function passList(stage) {
  const rows = [];
  let quiet = [];
  const { c } = stage;
  const flush = () => {
    if (quiet.length > 0)
      rows.push(element("details", { class: "quiet-passes", open: quiet.includes(stage.s) },
        element("summary", {}, `${count(quiet.length, "pass", "passes")} changed nothing`),
        quiet.map((s) => passButton(c, s, stage))));
    quiet = [];
  };
  stage.compilation.stages.forEach((_, s) => {
    if (Stages.changed(c, s)) {
      flush();
      rows.push(passButton(c, s, stage));
    } else quiet.push(s);
  });
  flush();
  return rows;
}

function passButton(c, s, stage) {
  const { data } = Stages.at(c, s);
  const before = s ? Stages.at(c, s - 1).data.nodes : data.nodes;
  const delta = data.nodes - before;
  const facts = s === 0 ? count(data.nodes, "node") : [
    `${formatNumber(data.ms)} ms`, count(data.matches, "match", "matches"),
    delta ? `${delta > 0 ? "+" : "−"}${Math.abs(delta)} nodes` : "", `check ${formatNumber(data.check_ms + data.proof_ms)} ms ✓`, data.unproved ? "not proved" : "",
  ].filter(Boolean).map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
  return element("button", {
    type: "button", class: "pass", "aria-pressed": String(s === stage.s), title: data.text || data.name,
    onclick: () => Explorer.go({ view: "pipeline", c, pass: data.name, left: "" }),
  }, element("b", {}, data.name), element("span", { class: "quiet" }, facts));
}

function stageName(stage) {
  return `${stage.compilation.name}: ${stage.data.name}`;
}

function stageSelect(label, chosen, onchange) {
  const select = element("select", { "aria-label": label, onchange: (event) => onchange(...event.target.value.split(":").map(Number)) });
  Stages.all().forEach((compilation, c) => {
    select.append(element("optgroup", { label: compilation.name }, compilation.stages.map((_, s) =>
      element("option", { value: `${c}:${s}`, selected: c === chosen.c && s === chosen.s }, Stages.at(c, s).data.name))));
  });
  return select;
}

// Return the stage on the left: that of the place, or the one before the stage on the right.
function leftStage(place, right) {
  const [c, s] = (place.left || "").split(":").map(Number);
  if (Stages.all()[c] && Stages.all()[c].stages[s] !== undefined) return Stages.at(c, s);
  return Stages.at(right.c, Math.max(0, right.s - 1));
}

// Return the ranges of sections that both stages have, refined so that each is in one section of both.
function refined(left, right) {
  const pairs = [];
  const [a, b] = [Stages.sections(left), Stages.sections(right)];
  const outer = (sections) => sections.filter((section) => section.first === null);
  const seen = {};
  const key = (section) => {
    seen[section.title] = (seen[section.title] || 0) + 1;
    return `${section.title} ${seen[section.title]}`;
  };
  const first = new Map(outer(a).map((section) => [key(section), section]));
  for (const title of Object.keys(seen)) delete seen[title];
  const second = new Map(outer(b).map((section) => [key(section), section]));
  const bounds = new Set();
  for (const section of [...a, ...b]) if (section.first !== null) { bounds.add(section.first); bounds.add(section.last + 1); }
  const cuts = [...bounds].sort((x, y) => x - y);
  const within = (sections, layer) => sections.find((s) => s.first !== null && s.first <= layer && layer <= s.last) || null;
  const layers = cuts.slice(0, -1).map((from, n) => ({
    first: from, last: cuts[n + 1] - 1, title: from === cuts[n + 1] - 1 ? `layer ${from}` : `layers ${from} to ${cuts[n + 1] - 1}`,
    left: within(a, from), right: within(b, from),
  })).filter((range) => range.left || range.right);
  let placed = false;
  const names = [...new Set([...first.keys(), ...second.keys()])];
  const order = ["inputs 1", "outside of the layers 1"];
  names.sort((x, y) => (order.indexOf(x) + 9) % 9 - (order.indexOf(y) + 9) % 9);
  for (const name of names) {
    if (!order.includes(name) && !placed) { pairs.push(...layers); placed = true; }
    pairs.push({ title: name.replace(/ \d+$/, ""), first: null, last: null, left: first.get(name) || null, right: second.get(name) || null });
  }
  if (!placed) pairs.push(...layers);
  return pairs;
}

// Return the name in the right stage of each line on the left, by identity.
function successor(left, right, name, value, byValue) {
  if (left.c === right.c && left.s <= right.s) return Stages.follow(left.c, left.s, right.s, name);
  return byValue.get(value) || name;
}

// Say what became of a line that has no partner on the right.
function fateOf(left, right, name, next) {
  if (left.c !== right.c || left.s > right.s) return "only here";
  if (next !== null) return next === name ? "moved" : `moved, now %${next}`;
  const [fate, other] = Stages.fate(left.c, Math.min(left.s + 1, right.s), name);
  return fate === "fused" && other ? `fused into %${other}` : fate === "dropped" ? "dropped" : "gone";
}

// Pair the lines of two sections: [{left, right}], in which a line may stand alone.
function paired(left, right, range, place) {
  const layer = range.first === null ? null : Stages.layerOf(range, place);
  const rows = (section) => section ? section.lines.map((line) => ({
    line, name: line.op === "return" ? "return" : Stages.filled(line.name, layer), layer, text: Stages.filled(line.text, layer),
  })) : [];
  const [a, b] = [rows(range.left), rows(range.right)];
  const byValue = new Map(b.filter((row) => row.line.value).map((row) => [row.line.value, row.name]));
  const places = new Map(b.map((row, n) => [row.name, n]));
  const wanted = a.map((row) => {
    const name = row.name === "return" ? "return" : successor(left, right, row.name, row.line.value, byValue);
    row.fate = fateOf(left, right, row.name, name);
    return name !== null && places.has(name) ? places.get(name) : -1;
  });
  const anchors = increasing(wanted);
  const found = [];
  let [i, j] = [0, 0];
  for (const [n, at] of [...anchors, [a.length, b.length]]) {
    while (i < n) found.push({ left: a[i++], right: null });
    while (j < at) found.push({ left: null, right: b[j++] });
    if (n < a.length) found.push({ left: a[i++], right: b[j++] });
  }
  return found;
}

// Return the longest increasing subsequence of places (those below 0 are left out), as [index, place].
function increasing(places) {
  const tails = [];
  const before = places.map(() => -1);
  places.forEach((place, n) => {
    if (place < 0) return;
    let [low, high] = [0, tails.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[tails[middle]] < place) low = middle + 1; else high = middle;
    }
    before[n] = low ? tails[low - 1] : -1;
    tails[low] = n;
  });
  const found = [];
  for (let n = tails.length ? tails[tails.length - 1] : -1; n >= 0; n = before[n]) found.push([n, places[n]]);
  return found.reverse();
}

function sideCell(row, stage, other, place, side) {
  if (!row) return element("td", { class: "absent" });
  const pass = stage.data.name;
  const chosen = place.node === row.name;
  const cell = element("td", {
    class: `line ${row.line.place.kind}${chosen ? " chosen" : ""}`, "data-name": row.name,
  }, element("code", {}, linkedText(row.text, stage.c, pass)));
  if (side === "left" && !other) cell.append(element("span", { class: "fate" }, ` → ${row.fate}`));
  return cell;
}

function sidesTable(left, right, place) {
  const body = element("tbody");
  for (const range of refined(left, right)) {
    const rows = paired(left, right, range, place);
    const same = (row) => row.left && row.right && row.left.text === row.right.text;
    const alike = rows.every(same);
    const shown = range.first === null ? "" : layerPicker(range, place);
    body.append(element("tr", { class: "section" }, element("th", { colspan: 2, scope: "colgroup" },
      range.title, shown, alike ? element("span", { class: "quiet" }, `  ${count(rows.length, "line")}, unchanged`) : "")));
    const near = rows.map((_, n) => rows.slice(Math.max(0, n - CONTEXT), n + CONTEXT + 1).some((row) => !same(row)));
    let hidden = [];
    const flush = () => {
      if (!hidden.length) return;
      const kept = hidden;
      const marker = element("tr", { class: "folded" }, element("td", { colspan: 2 }, element("button", {
        type: "button", onclick: () => marker.replaceWith(...kept.map((row) => sideRow(row, left, right, place, same))),
      }, `⋯ ${count(kept.length, "unchanged line")}`)));
      body.append(marker);
      hidden = [];
    };
    rows.forEach((row, n) => {
      const wanted = place.node && [row.left, row.right].some((one) => one && one.name === place.node);
      if (near[n] || wanted) { flush(); body.append(sideRow(row, left, right, place, same)); } else hidden.push(row);
    });
    flush();
  }
  return element("table", { class: "sides" },
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, stageName(left)), element("th", { scope: "col" }, stageName(right)))),
    body);
}

function sideRow(row, left, right, place, same) {
  const kind = !row.left ? "added" : !row.right ? "removed" : same(row) ? "same" : "changed";
  return element("tr", { class: kind },
    sideCell(row.left, left, row.right, place, "left"), sideCell(row.right, right, row.left, place, "right"));
}

function layerPicker(range, place) {
  if (range.first === range.last) return "";
  const layer = Stages.layerOf(range, place);
  return element("label", { class: "quiet" }, `  ${range.last - range.first + 1} alike; shown: layer `,
    element("input", {
      type: "number", min: range.first, max: range.last, value: layer, "aria-label": `Layer to show, from ${range.first} to ${range.last}`,
      onchange: (event) => Explorer.go({ layer: event.target.value, node: "" }),
    }));
}

function stepPass(by) {
  const stage = Stages.ofPlace(Explorer.place);
  const s = Math.min(Math.max(stage.s + by, 0), stage.compilation.stages.length - 1);
  Explorer.go({ c: stage.c, pass: Stages.at(stage.c, s).data.name, left: "" });
}

Explorer.view({
  name: "pipeline",
  title: "Pipeline",
  answers: "Which pass changed what? Each pass with its time and matches; two stages side by side.",
  available: () => Boolean(Explorer.data.compilations),
  keys: [["j, k", "Pipeline and Graph: the next and the previous pass"]],
  onKey(event) {
    if (event.key !== "j" && event.key !== "k") return false;
    stepPass(event.key === "j" ? 1 : -1);
    return true;
  },
  show(root, place) {
    const right = Stages.ofPlace(place);
    const left = leftStage(place, right);
    const pickers = element("p", { class: "pickers" },
      "Before ", stageSelect("Stage on the left", left, (c, s) => Explorer.go({ left: `${c}:${s}` })),
      " after ", stageSelect("Stage on the right", right, (c, s) => Explorer.go({ c, pass: Stages.at(c, s).data.name })),
      right.data.nearest ? element("span", { class: "quiet" }, ` nearest miss: ${right.data.nearest}`) : "");
    const compilations = Stages.all().length > 1 ? element("p", {}, element("label", {}, "Pipeline ",
      element("select", { onchange: (event) => Explorer.go({ c: event.target.value, pass: "", left: "" }) },
        Stages.all().map((one, c) => element("option", { value: c, selected: c === right.c }, one.name))))) : null;
    root.replaceChildren(
      element("div", { class: "columns" },
        element("div", { class: "passes", role: "group", "aria-label": "Passes" }, [compilations, passList(right)].flat().filter(Boolean)),
        element("div", { class: "compared" }, pickers, sidesTable(left, right, place))));
    if (place.node) {
      showValue(right, place.node);
      const chosen = root.querySelector(".chosen");
      if (chosen) chosen.scrollIntoView({ block: "nearest" });
    } else Explorer.details(overview(right));
  },
  find(words, most) {
    const stage = Stages.ofPlace(Explorer.place), has = matcher(words);
    const passes = Stages.all().flatMap((compilation, c) => compilation.stages.map((_, s) => Stages.at(c, s).data.name)
      .filter(has).map((name) => ({ kind: `pass of ${compilation.name}`, text: name, place: { view: "pipeline", c, pass: name, node: "", left: "" } })));
    const others = Stages.all().map((_, c) => c).filter((c) => c !== stage.c).map((c) => Stages.ofPlace({ c }));
    for (const one of [stage, ...others]) {
      const values = valuesWith(one, words, has, most - passes.length);
      if (values.length) return [...passes, ...values];
    }
    return passes;
  },
});

// Return the values of a stage whose lines have all of the words.
function valuesWith(stage, words, has, most) {
  const found = [];
  for (const section of Stages.sections(stage))
    for (const line of section.lines) {
      if (found.length >= most) return found;
      const layer = section.first === null ? null : layerInWords(words, section);
      const text = Stages.filled(line.text, layer);
      if (has(text) && line.op !== "return")
        found.push({ kind: `${Stages.title(section)}, ${stage.data.name}`, text: text.slice(0, 160), place: { node: Stages.filled(line.name, layer), c: stage.c, pass: stage.data.name } });
    }
  return found;
}

// Return the layer that words name, such as l12_ or layers.12., if a section has it.
function layerInWords(words, section) {
  const named = /(?:\bl|layers?\.)(\d+)/.exec(words);
  const layer = named ? Number(named[1]) : section.first;
  return layer >= section.first && layer <= section.last ? layer : section.first;
}

const WORDS = [
  ["Replicate", "Every rank holds the whole value."],
  ["Shard(d, axis)", "Each rank holds its part of dimension d, along a logical axis."],
  ["Partial(sum)", "Each rank holds a term; the value is their sum."],
  ["Partial(disjoint)", "Each rank holds a term; at most one term of each element is not zero."],
  ["6:2|2|1|1", "An extent of 6, of which four ranks hold 2, 2, 1 and 1. The parts add up to more if ranks hold copies."],
  ["T, S, R, N, B, C, K", "Extents that are known only at run time: tokens, starts of sequences, rows of logits, sequences, blocks, slots of the cache, states of linear attention."],
  ["a ++ b", "A parameter made of the tensors a and b, one after the other."],
  ["matches", "The places that a pass changed."],
];

function overview(stage) {
  const { compilation } = stage;
  const facts = [["ranks", compilation.tp], ["pipeline", compilation.pipeline], ...Object.entries(Explorer.data.about)];
  return [
    element("h2", {}, compilation.name), table(null, facts),
    element("p", { class: "quiet" }, "Choose a value to see its type, its readers, its checkpoint bytes, its source and why it is so."),
    element("h3", {}, "Words"), table(null, WORDS),
  ];
}
