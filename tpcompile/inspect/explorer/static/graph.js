"use strict";
// A stage as a drawing, with repeated layers folded, beside the source of the Hugging Face model.
// A value and its line of the source light up together.

const NODE_HEIGHT = 34;

// Return the name under which a value is drawn: in a section of several layers, that of the first.
function drawnName(sections, name) {
  const layer = layerOfName(name);
  if (layer === null) return name;
  const section = sections.find((one) => one.first !== null && one.first <= layer && layer <= one.last);
  return section ? name.replace(/^l\d+_/, `l${section.first}_`) : name;
}

// Return the nodes and edges of a stage. A section of several layers is drawn once. Inputs and other
// values that all layers read, such as the rotary tables, are not connected to the layers.
function drawnGraph(stage, weights) {
  const sections = Stages.sections(stage);
  const nodes = new Map();
  for (const section of sections)
    for (const line of section.lines)
      if (line.op !== "return" && (line.op !== "param" || weights)) {
        const name = Stages.filled(line.name, section.first);
        nodes.set(name, { name, line, section });
      }
  const edges = [], repeats = [];
  const layered = new Map();   // by value outside of layers: the sections of layers that read it
  for (const { line, section } of nodes.values())
    for (const operand of section.first === null ? [] : line.operands) {
      if (!layered.has(operand)) layered.set(operand, new Set());
      layered.get(operand).add(section);
    }
  for (const { name, line, section } of nodes.values())
    for (const operand of new Set(line.operands)) {
      const source = drawnName(sections, Stages.filled(operand, section.first));
      const common = section.first !== null && nodes.has(operand) && (nodes.get(operand).line.op === "input" || layered.get(operand).size > 1);
      if (nodes.has(source) && !common) edges.push([source, name]);
      const own = Stages.filled(operand.replaceAll("\u0002", "\u0001"), section.first);
      if (operand.includes("\u0002") && section.last > section.first && nodes.has(own)) repeats.push([own, name]);
    }
  return { sections, nodes, edges, repeats };
}

function laidOut({ nodes, edges }) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26, marginx: MARGIN, marginy: 24 });
  graph.setDefaultEdgeLabel(() => ({}));
  const connected = new Set(edges.flat()), single = [];
  for (const { name, line } of nodes.values()) {
    const label = nodeLabel(name, line);
    const box = { width: 16 + 7.3 * Math.max(label[0].length, label[1].length), height: NODE_HEIGHT };
    if (connected.has(name)) graph.setNode(name, box); else single.push([name, box]);
  }
  for (const [from, to] of edges) graph.setEdge(from, to);
  dagre.layout(graph);
  placeAbove(graph, single);
  return graph;
}

const GAP = 14, MARGIN = 40, NARROWEST = 800;

// Place values without edges in rows above the others, so that they do not widen the drawing.
function placeAbove(graph, single) {
  const size = graph.graph(), drawn = graph.nodes().length > 0;
  const width = Math.max(drawn ? size.width : 0, NARROWEST);
  let [x, y] = [MARGIN, GAP];
  for (const [, box] of single) {
    if (x + box.width > width - MARGIN && x > MARGIN) [x, y] = [MARGIN, y + NODE_HEIGHT + GAP];
    Object.assign(box, { x: x + box.width / 2, y: y + NODE_HEIGHT / 2 });
    x += box.width + GAP;
  }
  const down = single.length ? y + NODE_HEIGHT : 0;
  for (const name of graph.nodes()) graph.node(name).y += down;
  for (const edge of graph.edges()) for (const point of graph.edge(edge).points) point.y += down;
  for (const [name, box] of single) graph.setNode(name, box);
  size.width = width;
  size.height = down + (drawn ? size.height : GAP);
}

// Draw a frame around the values of each section of layers.
function frames({ sections, nodes }, graph) {
  return sections.filter((section) => section.first !== null).flatMap((section) => {
    const own = [...nodes.values()].filter((one) => one.section === section).map(({ name }) => graph.node(name));
    if (!own.length) return [];
    const left = Math.min(...own.map((n) => n.x - n.width / 2)) - 12, top = Math.min(...own.map((n) => n.y - n.height / 2)) - 8;
    const right = Math.max(...own.map((n) => n.x + n.width / 2)) + 12, bottom = Math.max(...own.map((n) => n.y + n.height / 2)) + 8;
    return [element("svg:rect", { x: left, y: top, width: right - left, height: bottom - top, class: "cluster" }),
      element("svg:text", { x: left + 4, y: top - 3, class: "second" }, Stages.title(section))];
  });
}

function nodeLabel(name, line) {
  return [`%${name}`.slice(0, 34), `${line.op} ${line.place.text}`];
}

function drawing(stage, weights) {
  const content = drawnGraph(stage, weights);
  const graph = laidOut(content);
  const { width, height } = graph.graph();
  const svg = element("svg:svg", {
    "data-width": width, "data-height": height, viewBox: `0 0 ${width} ${height}`, role: "group",
    "aria-label": `The graph after ${stage.data.name}: ${content.nodes.size} values`, class: "graph",
  });
  svg.append(...frames(content, graph));
  const path = (points) => `M${points.map((p) => `${p.x.toFixed(1)} ${p.y.toFixed(1)}`).join("L")}`;
  for (const { v, w } of graph.edges())
    svg.append(element("svg:path", { d: path(graph.edge(v, w).points), class: "edge", "data-from": v, "data-to": w }));
  for (const [from, to] of content.repeats) svg.append(repeatEdge(graph.node(from), graph.node(to)));
  for (const { name, line } of content.nodes.values()) {
    const node = graph.node(name);
    const [first, second] = nodeLabel(name, line);
    const go = () => Explorer.go({ node: name, c: stage.c, pass: stage.data.name });
    const lit = (on) => {
      const chosen = Explorer.place.node;
      lightUp(on ? line.origin : null, on ? name : null);
      if (on || chosen) showValue(stage, on ? name : chosen); else Explorer.details(overview(stage));
    };
    svg.append(element("svg:g", {
      class: `node ${line.place.kind} ${line.op === "param" ? "param" : ""}`,
      transform: `translate(${node.x - node.width / 2} ${node.y - node.height / 2})`,
      tabindex: 0, role: "button", "aria-label": `%${name}, ${second}`, "data-name": name,
      "data-source": line.origin && line.origin[1] ? `${line.origin[1]}:${line.origin[2]}` : null,
      onclick: go, onmouseenter: () => lit(true), onmouseleave: () => lit(false), onfocus: () => lit(true), onblur: () => lit(false),
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { go(); event.preventDefault(); } },
    },
    element("svg:title", {}, Stages.filled(line.text, layerOfName(name))),
    element("svg:rect", { width: node.width, height: node.height, rx: 4 }),
    element("svg:text", { x: 8, y: 14 }, first), element("svg:text", { x: 8, y: 28, class: "second" }, second)));
  }
  return svg;
}

// Set the size of a drawing.
function zoomDrawing(picture, scale) {
  const svg = picture.querySelector("svg");
  svg.setAttribute("width", svg.dataset.width * scale);
  svg.setAttribute("height", svg.dataset.height * scale);
  return scale;
}

const READABLE = 0.6;   // the least scale that "Fit" chooses

// Fit the first layers into the frame of the drawing, or all of it if there are no layers.
function fitDrawing(picture) {
  const svg = picture.querySelector("svg"), frame = svg.querySelector(".cluster");
  const box = frame ? frame.getBBox() : { x: 0, y: 0, width: +svg.dataset.width, height: +svg.dataset.height };
  const fitting = Math.min((picture.clientWidth - 8) / (box.width + 2 * GAP), (picture.clientHeight - 8) / (box.height + 2 * GAP));
  const scale = zoomDrawing(picture, Math.min(1, Math.max(READABLE, fitting)));
  picture.scrollLeft = Math.max(0, (box.x + box.width / 2) * scale - picture.clientWidth / 2);
  picture.scrollTop = box.height * scale < picture.clientHeight ? (box.y - 2 * GAP) * scale : 0;
  return scale;
}

function zoomButtons(picture) {
  let scale = fitDrawing(picture);
  const button = (text, label, next) => element("button", { type: "button", "aria-label": label, onclick: () => { scale = next(); } }, text);
  const zoomed = (next) => () => zoomDrawing(picture, next());
  return [button("−", "Smaller", zoomed(() => Math.max(0.2, scale / 1.25))), button("+", "Larger", zoomed(() => Math.min(3, scale * 1.25))),
    button("Fit", "Fit the first layers", () => fitDrawing(picture))];
}

// Draw the way from the end of a repeated layer to the start of the next one.
function repeatEdge(from, to) {
  const x = Math.max(from.x + from.width / 2, to.x + to.width / 2) + 24;
  return element("svg:path", { class: "edge repeat", d:
    `M${from.x + from.width / 2} ${from.y}C${x} ${from.y} ${x} ${to.y} ${to.x + to.width / 2} ${to.y}` },
  element("svg:title", {}, "the next layer"));
}

// Mark the line of a source, and all values that come from it.
function lightUp(origin, name) {
  for (const lit of document.querySelectorAll(".lit")) lit.classList.remove("lit");
  if (name) document.querySelector(`.view-graph [data-name="${CSS.escape(name)}"]`)?.classList.add("lit");
  if (!origin || !origin[1]) return;
  const key = `${origin[1]}:${origin[2]}`;
  for (const one of document.querySelectorAll(`.view-graph [data-source="${CSS.escape(key)}"]`)) one.classList.add("lit");
  const line = document.querySelector(`.source [data-source="${CSS.escape(key)}"]`);
  if (line) line.parentElement.scrollTop = line.offsetTop - line.parentElement.clientHeight / 2;
}

// Show the source files that values of a stage come from.
function sourcePanel(stage, place) {
  const used = new Map();
  for (const section of Stages.sections(stage))
    for (const { origin } of section.lines)
      if (origin && Explorer.data.sources[origin[1]]) {
        if (!used.has(origin[1])) used.set(origin[1], new Set());
        used.get(origin[1]).add(origin[2]);
      }
  if (!used.size) return element("p", { class: "quiet" }, "No source of the model was found.");
  const file = used.has(place.file) ? place.file : used.keys().next().value;
  const lines = Explorer.data.sources[file].split("\n");
  const first = Math.min(...used.get(file));
  const panel = element("pre", { class: "source", tabindex: 0, "aria-label": `Source ${file}` }, lines.map((text, n) => {
    const key = used.get(file).has(n + 1) ? `${file}:${n + 1}` : null;
    return element("span", {
      class: key ? "code used" : "code", "data-source": key,
      onmouseenter: key ? () => lightUp([null, file, n + 1]) : null,
      onclick: key ? () => {
        const node = document.querySelector(`.view-graph svg [data-source="${CSS.escape(key)}"]`);
        if (node) { node.scrollIntoView({ block: "center", inline: "center" }); Explorer.go({ node: node.dataset.name }); }
      } : null,
    }, `${String(n + 1).padStart(4)}  ${text}`);
  }));
  requestAnimationFrame(() => {
    const at = panel.children[Math.max(0, first - 3)];
    if (at && !place.node) panel.scrollTop = at.offsetTop;
  });
  const files = [...used.keys()];
  const picker = files.length < 2 ? element("h2", { class: "mono" }, file)
    : element("select", { "aria-label": "Source file", onchange: (event) => Explorer.go({ file: event.target.value }) },
      files.map((one) => element("option", { selected: one === file }, one)));
  return element("div", { class: "source-side" }, picker, panel);
}

let drawn = null;   // the drawing that is shown: it stays if only the chosen value changes

Explorer.view({
  name: "graph",
  title: "Graph",
  answers: "How do values flow, and where are they sharded? The drawing of a stage beside the source of the model.",
  available: () => Boolean(Explorer.data.compilations),
  onKey(event) {
    if (event.key !== "j" && event.key !== "k") return false;
    stepPass(event.key === "j" ? 1 : -1);
    return true;
  },
  hide() { drawn = null; },
  show(root, place) {
    const stage = Stages.ofPlace(place);
    const weights = place.weights === "1";
    const key = [stage.c, stage.s, weights, place.file].join(" ");
    if (drawn !== key) {
      const picture = element("div", { class: "picture", tabindex: 0, role: "region", "aria-label": "Drawing of the graph" }, drawing(stage, weights));
      root.replaceChildren(
        element("p", { class: "pickers" }, "After ",
          stageSelect("Stage to draw", stage, (c, s) => Explorer.go({ c, pass: Stages.at(c, s).data.name, node: "" })),
          element("label", {}, element("input", {
            type: "checkbox", checked: weights, onchange: (event) => Explorer.go({ weights: event.target.checked ? "1" : "" }),
          }), " weights"),
          element("span", { class: "legend" }, ["Replicate", "Shard", "Partial"].map((kind) =>
            element("span", { class: `chip ${kind}` }, kind))),
          element("span", { class: "zoom" })),
        element("div", { class: "columns" }, picture, sourcePanel(stage, place)));
      root.querySelector(".zoom").append(...zoomButtons(picture));
      drawn = key;
    }
    for (const old of root.querySelectorAll(".node.chosen")) old.classList.remove("chosen");
    const shown = place.node ? drawnName(Stages.sections(stage), place.node) : null;
    const chosen = shown ? root.querySelector(`svg [data-name="${CSS.escape(shown)}"]`) : null;
    if (chosen) {
      chosen.classList.add("chosen");
      chosen.scrollIntoView({ block: "center", inline: "center" });
    }
    if (place.node) {
      showValue(stage, place.node);
      const found = Stages.find(stage, place.node);
      if (found) lightUp(found.line.origin, shown);
    } else Explorer.details(overview(stage));
  },
});
