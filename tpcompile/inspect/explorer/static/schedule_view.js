// The Schedule view: the timeline with its controls, its keys and its places in the address.

(() => {
  "use strict";

  const D = ScheduleData, S = ScheduleSums, T = ScheduleDetails;
  const view = { element: null, schedule: null, picture: null, place: {}, measured: new Map() };

  const json = () => Explorer.data.schedule;
  const decoded = () => view.loading ||= columnsOf("schedule", json().index)
    .then((columns) => view.schedule = D.decode(json(), columns));

  Explorer.view({
    name: "schedule",
    title: "Schedule",
    answers: "Where does the time of a decode step go? The timeline of all workers, and what waits for what.",
    available: () => Boolean(json()),
    show,
    hide: () => document.getElementById("details").replaceChildren(),
    onKey,
    find,
    keys: [
      ["← → ↑ ↓", "schedule: move in time, and over the workers"],
      ["+ −", "schedule: zoom in and out in time; so does the wheel"],
      [", .", "schedule: lower and higher rows; so does the wheel with Alt"],
      ["0", "schedule: the whole step"],
      ["[ ]", "schedule: the instruction before and after on the same worker"],
      ["c", "schedule: outline the critical path"],
    ],
  });

  // ---- showing ----------------------------------------------------------------------------------

  function show(root, place) {
    if (!view.element) view.element = json().verified ? element("p", {}, "Reading the schedule …") : refused();
    if (view.element.parentNode !== root) {
      root.append(view.element);
      if (view.picture) later();
      view.detailed = null;
    }
    if (!json().verified) return;
    if (view.picture) return apply(place);
    if (view.opening) return;
    view.opening = decoded().then(() => {
      const made = page();
      view.element.replaceWith(made);
      view.element = made;
      view.picture = new TimelinePicture(view.schedule, view.canvas);
      view.picture.onDraw = () => ScheduleOverview.draw(view);
      connect();
      tables();
      apply(Explorer.place);
      document.body.dataset.schedule = "true";
    });
  }

  // A program with faults may deadlock, so it has no times.
  function refused() {
    return element("div", {}, T.faults(json()));
  }

  function page() {
    const { schedule } = view, layers = S.layersOf(schedule, schedule.predicted).map(({ layer }) => layer);
    layers.sort((a, b) => a - b);
    const option = (value, text) => element("option", { value }, text);
    view.layerPicker = element("select", { "aria-label": "Go to a layer", onchange: () => goToLayer(view.layerPicker.value) },
      option("", "whole step"), layers.map((layer) => option(layer, `layer ${layer}`)));
    view.stepPicker = element("select", { "aria-label": "Measured step beside the predicted one",
      onchange: () => Explorer.go({ step: view.stepPicker.value }) },
      option("", "predicted only"),
      json().measured.map((step, number) => option(number + 1, `step ${number + 1}: ${formatNumber(step.us)} µs`)));
    view.chainBox = element("input", { type: "checkbox", onchange: () => Explorer.go({ path: view.chainBox.checked ? "1" : "" }) });
    const button = (text, title, onclick) => element("button", { type: "button", title, onclick }, text);
    view.canvas = element("canvas", { class: "timeline", tabindex: "0", role: "img",
      "aria-label": "Timeline of all workers. Arrow keys move, plus and minus zoom. The tables below and the panel have the same facts." });
    view.overview = element("canvas", { class: "overview", role: "img",
      "aria-label": "Busy workers by kind of instruction over the whole step" });
    view.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    view.waits = element("div");
    view.waitPicker = element("select", { "aria-label": "Layer of the waits", onchange: () => fillWaits() },
      option("", "all layers"), layers.map((layer) => option(layer, `layer ${layer}`)));
    view.tables = element("div", { class: "tables", tabindex: "0", role: "region", "aria-label": "Where the time goes" });
    return element("div", { class: "schedule" },
      element("p", { class: "figures" }, T.figures(schedule).join(" · ")),
      element("div", { class: "controls" },
        element("label", {}, "Go to ", view.layerPicker),
        json().measured.length ? element("label", {}, "Beside it ", view.stepPicker) : null,
        element("label", {}, view.chainBox, " critical path"),
        button("zoom out", "Key −", () => zoomed(1.5)), button("zoom in", "Key +", () => zoomed(1 / 1.5)),
        button("whole step", "Key 0", whole),
        button("lower rows", "Key ,", () => rows(1 / 1.5)), button("higher rows", "Key .", () => rows(1.5)),
        element("span", { class: "legend" }, json().kinds.map((kind, number) => element("span", {}, T.kindMark(schedule, number))))),
      view.overview,
      element("div", { class: "plot" }, view.canvas, view.tip),
      view.tables);
  }

  function tables() {
    const { schedule } = view;
    view.changing = element("div");
    view.tables.replaceChildren(
      element("div", {}, T.whereTimeGoes(schedule)),
      view.changing,
      element("div", {}, T.criticalPath(schedule)));
    fillTables();
  }

  function fillTables() {
    const runs = view.picture.runs, last = runs[runs.length - 1];
    const which = runs.length > 1 ? ` (${last.name})` : "";
    view.changing.replaceChildren(
      ...runs.length > 1 ? T.predictedAndMeasured(view.schedule, runs) : [],
      element("h2", {}, `What waits longest${which} in `, view.waitPicker), view.waits,
      ...T.whyIdle(view.schedule, last));
    fillWaits();
  }

  function fillWaits() {
    const runs = view.picture.runs, layer = view.waitPicker.value;
    view.waits.replaceChildren(...T.whatWaits(view.schedule, runs[runs.length - 1], layer === "" ? null : Number(layer)));
  }

  // ---- the place in the address -------------------------------------------------------------------

  // Go where the address says. Only parts that have changed since the last time move the timeline.
  function apply(place) {
    const { picture, schedule } = view, old = view.place;
    view.place = place;
    const number = (name) => place[name] === undefined || place[name] === "" ? NaN : Number(place[name]);
    const changed = (...names) => names.some((name) => place[name] !== old[name]);
    if (changed("step")) setStep(number("step"));
    if (changed("path")) { picture.showChain = place.path === "1"; view.chainBox.checked = picture.showChain; }
    const layer = number("layer"), span = picture.layers.find((one) => one.layer === layer);
    if (changed("layer")) {
      view.layerPicker.value = span ? String(layer) : "";
      if (span) view.waitPicker.value = String(layer);
      fillWaits();
    }
    if (changed("layer", "from", "to")) {
      if (number("to") > number("from")) picture.setWindow(number("from") * 1000, number("to") * 1000);
      else if (span) showLayer(span);
      else if (changed("from", "to")) picture.setWindow(0, picture.end);
    }
    const chosen = number("instruction");
    const known = Number.isInteger(chosen) && chosen >= 0 && chosen < schedule.count;
    picture.selected = known ? chosen : -1;
    const asked = changed("from", "to") && place.from && picture.shows(picture.selected);
    if (known && changed("instruction") && !asked) picture.reveal(chosen);
    const detailed = `${picture.selected} ${place.step}`;
    if (view.detailed !== detailed) {
      view.detailed = detailed;
      if (known) Explorer.details(T.instruction(schedule, chosen, picture.runs));
      else Explorer.details(hint(place.instruction));
    }
    view.overviewPicture = null;
    picture.ask();
  }

  function hint(asked) {
    return element("p", { class: "quiet" }, asked === undefined || asked === "" ? "Choose an instruction in the timeline to see what it reads, writes and waits for."
      : `There is no instruction ${asked}; the program has instructions 0 to ${view.schedule.count - 1}.`);
  }

  function setStep(step) {
    const { schedule, picture } = view, known = Number.isInteger(step) && json().measured[step - 1];
    if (known && !view.measured.has(step)) view.measured.set(step, D.measured(schedule, step - 1));
    view.stepPicker.value = known ? String(step) : "";
    const all = picture.from === 0 && picture.to === picture.end;
    picture.setRuns(known ? [schedule.predicted, view.measured.get(step)] : [schedule.predicted]);
    if (all) picture.setWindow(0, picture.end);
    fillTables();
  }

  function showLayer({ start, finish }) {
    const margin = 0.03 * (finish - start);
    view.picture.setWindow(start - margin, finish + margin);
  }

  function goToLayer(value) {
    Explorer.go({ layer: value, from: "", to: "" });
    if (value === "") whole();
  }

  // Write the visible time into the address, when it has been at rest.
  function moved() {
    view.picture.ask();
    clearTimeout(view.timer);
    view.timer = setTimeout(() => {
      const { from, to, end } = view.picture, all = from === 0 && to === end;
      if (Explorer.shown.name !== "schedule") return;
      const text = (ns) => (ns / 1000).toFixed(3);
      const parts = all ? { from: "", to: "", layer: "" } : { from: text(from), to: text(to) };
      const known = Object.fromEntries(Object.entries(parts).filter(([, value]) => value));
      view.place = { ...view.place, from: undefined, to: undefined, ...known };   // it is visible already
      if (Object.keys(parts).some((name) => (Explorer.place[name] || "") !== parts[name])) Explorer.go(parts, true);
    }, 250);
  }

  // ---- controls -----------------------------------------------------------------------------------

  function zoomed(factor, x) { view.picture.zoom(factor, x); moved(); }

  function rows(factor, y = view.picture.plotHeight / 2) {
    view.picture.setRow(view.picture.row * factor, y);
    view.picture.ask();
  }

  function whole() {
    view.picture.setWindow(0, view.picture.end);
    view.picture.fitRows();
    moved();
  }

  function later() {
    cancelAnimationFrame(view.resizing);
    view.resizing = requestAnimationFrame(() => {
      const { picture } = view, fitted = picture.row <= picture.least;
      if (!view.canvas.clientWidth) return;
      picture.resize();
      if (fitted) picture.fitRows(); else picture.scrollTo(picture.top);
      view.overviewPicture = null;
      picture.draw();
    });
  }

  function connect() {
    const { canvas, picture } = view;
    new ResizeObserver(later).observe(canvas);
    Explorer.onTheme.push(() => { picture.readColours(); view.overviewPicture = null; picture.ask(); });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const step = Math.max(-1, Math.min(1, event.deltaY / 100));
      if (event.altKey) return rows(1.25 ** -step, event.offsetY - TimelinePicture.AXIS);
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { picture.pan(event.deltaX || event.deltaY); return moved(); }
      zoomed(1.3 ** step, event.offsetX);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      view.drag = { x: event.clientX, y: event.clientY, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => view.drag ? dragged(event) : hovered(event));
    canvas.addEventListener("pointerup", (event) => {
      const drag = view.drag;
      view.drag = null;
      if (drag && !drag.moved) chosen(event);
    });
    canvas.addEventListener("pointercancel", () => { view.drag = null; });
    canvas.addEventListener("pointerleave", () => { view.tip.hidden = true; picture.hovered = -1; picture.ask(); });
    const seek = (event) => {
      if (!(event.buttons & 1)) return;
      const half = (picture.to - picture.from) / 2;
      const left = TimelinePicture.GUTTER, at = (event.offsetX - left) / (view.overview.clientWidth - left) * picture.end;
      picture.setWindow(at - half, at + half);
      moved();
    };
    view.overview.addEventListener("pointerdown", seek);
    view.overview.addEventListener("pointermove", seek);
  }

  function dragged(event) {
    const { drag, picture } = view;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    Object.assign(drag, { moved: true, x: event.clientX, y: event.clientY });
    picture.pan(-dx);
    picture.scrollTo(picture.top - dy);
    view.tip.hidden = true;
    moved();
  }

  function hovered(event) {
    const { picture, schedule, tip } = view, found = picture.at(event.offsetX, event.offsetY);
    picture.hovered = found && !found.idle ? found.number : -1;
    picture.ask();
    tip.hidden = !found;
    if (!found) return;
    tip.replaceChildren(...tipOf(schedule, found).map((line) => element("div", {}, line)));
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = `${Math.max(0, Math.min(event.offsetX + 14, picture.width - wide - 4))}px`;
    tip.style.top = `${event.offsetY + 18 + high > picture.height ? Math.max(0, event.offsetY - high - 10) : event.offsetY + 18}px`;
  }

  function tipOf(schedule, { run, worker, number, idle }) {
    const where = T.workerText(schedule, worker);
    if (number < 0) return [where, "idle: nothing left to do"];
    if (!idle) return [D.label(schedule, number),
      `${T.us(run.start[number])} to ${T.us(run.finish[number])} (${T.us(run.finish[number] - run.start[number])})`, where];
    const early = D.releasedBy(schedule, run)[number];
    return [`${where}, idle for ${T.us(run.idle[number])}`, `before ${D.label(schedule, number)}`,
      early < 0 ? "" : `which waits for ${D.label(schedule, early)}`].filter(Boolean);
  }

  function chosen(event) {
    const found = view.picture.at(event.offsetX, event.offsetY);
    if (found && found.number >= 0) {
      view.place = { ...view.place, instruction: String(found.number) };   // it is visible already
      Explorer.go({ instruction: found.number });
    }
  }

  function onKey(event) {
    const { picture, schedule } = view;
    if (!picture) return false;
    const beside = (step) => {
      if (picture.selected < 0) return;
      const next = D.neighbour(schedule.predicted, picture.selected, step);
      if (next >= 0) Explorer.go({ instruction: next });
    };
    const scroll = (step) => { picture.scrollTo(picture.top + step * picture.plotHeight / 4); picture.ask(); };
    const keys = {
      ArrowLeft: () => { picture.pan(-picture.plotWidth / 8); moved(); },
      ArrowRight: () => { picture.pan(picture.plotWidth / 8); moved(); },
      ArrowUp: () => scroll(-1), ArrowDown: () => scroll(1),
      "+": () => zoomed(1 / 1.5), "=": () => zoomed(1 / 1.5), "-": () => zoomed(1.5), 0: whole,
      ",": () => rows(1 / 1.5), ".": () => rows(1.5),
      "[": () => beside(-1), "]": () => beside(1),
      c: () => Explorer.go({ path: picture.showChain ? "" : "1" }),
    };
    const inTables = event.target.closest && event.target.closest(".tables, #details");
    if (!Object.hasOwn(keys, event.key) || (inTables && event.key.startsWith("Arrow"))) return false;
    keys[event.key]();
    return true;
  }

  // ---- search and hooks ---------------------------------------------------------------------------

  function find(words, most) {
    const { schedule } = view, found = [], has = matcher(words);
    const put = (kind, text, place) => found.push({ kind, text, place: { view: "schedule", ...place } });
    const number = words.replace(/^instruction\s+/, "");
    if (/^\d+$/.test(number) && Number(number) < json().instructions)
      put("instruction", schedule ? `${number}: ${D.label(schedule, Number(number))}` : number, { instruction: Number(number) });
    if (!schedule) { if (json().verified) decoded(); return found; }
    for (const { layer } of S.layersOf(schedule, schedule.predicted))
      if (words === `layer ${layer}`) put("schedule", `layer ${layer}`, { layer, from: "", to: "" });
    const first = view.firsts ||= firstOfGroups(schedule);
    for (let group = 0; group < first.length && found.length < most; group++) {
      const text = D.groupText(schedule, group);
      if (has(text)) put("instruction", text, { instruction: first[group] });
    }
    return found.slice(0, most);
  }

  function firstOfGroups(schedule) {
    const found = new Int32Array(schedule.columns.group_kind.length).fill(-1);
    for (let i = schedule.count - 1; i >= 0; i--) found[schedule.columns.group[i]] = i;
    return found;
  }

  // Hooks of benchmarks and tests. Levels belong to the predicted run.
  Explorer.timeline = {

    // Return the levels of detail: the workers per row and the ns per cell of each.
    levels: () => view.picture.runs[0].levels.map(({ group, width }) => ({ group, width })),
    // Return the ns that each kind takes in the cells of a level, by kind.
    totals: (level) => named(S.totals(view.schedule, view.schedule.predicted, view.schedule.predicted.levels[level])),
    // Return the ns that each kind takes, from the instructions themselves.
    rawTotals: () => named(S.rawTotals(view.schedule, view.schedule.predicted)),
    // Pan and zoom for some frames; return the ms between them, and the ms that each took to draw.
    script: (frames) => view.picture.script(frames),
  };

  function named(sums) {
    return Object.fromEntries(sums.map((sum, kind) => [json().kinds[kind].name, sum]));
  }
})();
