// The facts of the schedule as tables: one instruction in the panel, and sums below the timeline.

const ScheduleDetails = (() => {
  "use strict";

  const D = ScheduleData, S = ScheduleSums;
  const FEW = 12;   // rows that are shown at first

  function us(ns, digits = 2) {
    return `${formatNumber(ns / 1000, ns > 0 && ns < 100 ? 3 : digits)} µs`;
  }

  function percent(part, whole) {
    return whole ? `${formatNumber(100 * part / whole)} %` : "";
  }

  function linkTo(schedule, number, text) {
    return Explorer.link(text || `${number}: ${D.label(schedule, number)}`, { view: "schedule", instruction: number });
  }

  function kindMark(schedule, kind) {
    const own = schedule.json.kinds[kind];
    return [element("span", { class: "swatch", style: `background:${own.colour}`, "aria-hidden": "true" }), own.name];
  }

  // Make a table whose columns after the first `words` are numbers.
  function numbers(headings, rows, words = 1) {
    const made = table(headings, rows);
    for (const row of made.rows)
      [...row.cells].forEach((cell, place) => { if (place >= words) cell.classList.add("number"); });
    return scrolled(headings.filter(Boolean).join(", "), made);
  }

  // Make a table of names and values.
  function factTable(rows) {
    return element("table", { class: "facts" }, element("tbody", {}, rows.map(([name, value]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)))));
  }

  // Make a list of rows of which the first few are shown, and a button that shows the others.
  function fewRows(headings, each, make) {
    const holder = element("div");
    const show = (most) => holder.replaceChildren(
      table(headings, each.slice(0, most).map(make)),
      ...(each.length > most ? [element("button", { type: "button", onclick: () => show(each.length) },
        `Show all ${each.length.toLocaleString("en")}`)] : []));
    show(FEW);
    return holder;
  }

  // ---- one instruction --------------------------------------------------------------------------

  function instruction(schedule, number, runs) {
    const run = schedule.predicted, kind = schedule.json.kinds[schedule.kind[number]];
    const before = D.neighbour(run, number, -1), after = D.neighbour(run, number, 1);
    return [
      element("h2", {}, `Instruction ${number.toLocaleString("en")}`),
      element("p", { class: "mono" }, D.label(schedule, number)),
      factTable([
        ["Kind", kindMark(schedule, schedule.kind[number])],
        schedule.layer[number] < 0 ? null : ["Layer", Explorer.link(`layer ${schedule.layer[number]}`,
          { view: "schedule", layer: schedule.layer[number] })],
        ["Worker", workerText(schedule, run.worker[number])],
        ...D.operands(schedule, number).map(([name, value]) => [name, element("code", {}, value)]),
        ["On the critical path", schedule.onChain[number] ? "yes" : "no"],
        before < 0 ? null : ["Before on its worker", linkTo(schedule, before)],
        after < 0 ? null : ["After on its worker", linkTo(schedule, after)],
      ].filter(Boolean)),
      ...timesOf(schedule, number, runs),
      ...waitsOf(schedule, number, runs),
      ...accessesOf(schedule, number),
      ...signalsOf(schedule, number),
    ];
  }

  function workerText(schedule, worker) {
    const rank = Math.floor(worker / schedule.perRank);
    return `rank ${rank}, worker ${worker - rank * schedule.perRank}`;
  }

  function timesOf(schedule, number, runs) {
    const [fixed, bytes, work] = schedule.json.parts[schedule.columns.parts[number]];
    const facts = [["start", (run) => run.start[number]], ["finish", (run) => run.finish[number]],
      ["takes", (run) => run.finish[number] - run.start[number]], ["worker idle before", (run) => run.idle[number]]];
    const rows = facts.map(([name, fact]) => [name, ...runs.map((run) => us(fact(run)))]);
    const { bytes_per_us, workers } = schedule.json.target;
    const share = bytes_per_us / workers;
    return [
      element("h3", {}, "Time"),
      numbers(["moment", ...runs.map((run) => run.name)], rows),
      factTable([
        ["Fixed", us(fixed)],
        ["Loads", bytes ? `${formatBytes(bytes)}: ${us(bytes / share * 1000)} at a worker's share of the bandwidth` : "nothing"],
        ["Arithmetic", work ? `${us(work)}, while it loads` : "none that counts"],
      ]),
    ];
  }

  function waitsOf(schedule, number, runs) {
    const waits = D.waits(schedule, number), found = [element("h3", {}, "Waits for")];
    if (!waits.length) found.push(element("p", {}, "No counter: the order of its queue is enough."));
    for (const run of runs) {
      const early = D.releasedBy(schedule, run)[number];
      if (early < 0) continue;
      const waited = run.finish[early] > run.start[number] - run.idle[number];
      found.push(element("p", {},
        runs.length > 1 ? `${run.name}: last to finish: ` : "Last to finish: ",
        linkTo(schedule, early), ` at ${us(run.finish[early])}. `,
        run.idle[number] > 0 && waited
          ? `The worker was idle for ${us(run.idle[number])} until then.`
          : "The worker was busy until after that, so it did not wait."));
    }
    for (const wait of waits) found.push(oneWait(schedule, number, wait));
    return found;
  }

  function oneWait(schedule, number, { counter, until, by }) {
    const run = schedule.predicted, all = by.length;
    const which = until > 0 ? (until === all ? (all === 1 ? "its only signal" : `all ${all.toLocaleString("en")} signals`)
      : `${until} of ${all} signals`)
      : `${until === 0 ? "all" : `all but ${-until}`} signals of the step before`;
    const each = [...by].sort((a, b) => run.finish[b] - run.finish[a] || a - b);
    return element("details", { open: true, class: "wait" },
      element("summary", {}, `Counter ${counter} reaches ${until}: ${which}`),
      fewRows(["signalled by", "through"], each, (early) => [
        [linkTo(schedule, early), element("div", { class: "quiet" }, `finishes at ${us(run.finish[early])}`)],
        through(schedule, early, number, until > 0)]));
  }

  // Say through which regions an instruction depends on another one.
  function through(schedule, early, late, sameStep) {
    const found = D.conflicts(schedule, early, late);
    if (!found.length)
      return element("span", { class: "quiet" }, sameStep
        ? "no common region: others that wait for the same counter have one"
        : "no common region: a step starts when the one before is complete");
    return found.map(({ hazard, buffer, box }) => element("div", {},
      `${hazard}${sameStep ? "" : " (next step)"}: `,
      element("code", {}, `${D.bufferText(schedule, buffer)} ${D.boxText(box)}`)));
  }

  function accessesOf(schedule, number) {
    const titles = { read: "Reads", write: "Writes", join: "Finishes together with other blocks" };
    const each = D.accesses(schedule, number);
    return Object.entries(titles).flatMap(([how, title]) => {
      const own = each.filter((access) => access.how === how);
      if (!own.length) return [];
      return [element("h3", {}, title), fewRows(["buffer", "part", "of"], own, ({ buffer, box }) => {
        const like = schedule.json.buffers[schedule.columns.buffer_like[buffer]];
        return [D.bufferText(schedule, buffer), element("code", {}, D.boxText(box)),
          element("span", { class: "quiet" }, `${like.role} ${like.dtype}[${like.shape.join(", ")}]`)];
      })];
    });
  }

  function signalsOf(schedule, number) {
    const found = [element("h3", {}, "Signals")];
    const counters = [...D.signals(schedule, number)];
    if (!counters.length) found.push(element("p", {}, "No counter."));
    for (const counter of counters) {
      const waiting = [...D.waiters(schedule, counter)];
      found.push(element("details", {},
        element("summary", {}, `Counter ${counter}: ${count(waiting.length, "instruction")} wait for it`),
        fewRows(["instruction", "starts"], waiting, (late) =>
          [linkTo(schedule, late), us(schedule.predicted.start[late])])));
    }
    return found;
  }

  // ---- sums -------------------------------------------------------------------------------------

  function figures(schedule) {
    const { json } = schedule, band = json.bandwidth, run = schedule.predicted;
    const whole = run.end * json.workers;
    const idle = whole - S.rawTotals(schedule, run).reduce((a, b) => a + b, 0);
    return [
      `${count(json.instructions, "instruction")} on ${count(json.workers, "worker")}`
        + (json.ranks > 1 ? ` of ${json.ranks} ranks` : ""),
      `${us(run.end, 1)} predicted`,
      `bandwidth limit ${formatNumber(band.floor_us)} µs (${formatBytes(band.loaded_bytes)} of the rank that loads most, at ${formatNumber(band.gb_per_s, 0)} GB/s), ${percent(band.floor_us, run.end / 1000)} of the predicted time`,
      `critical path ${formatNumber(json.critical_us)} µs with unlimited workers`,
      `workers idle ${percent(idle, whole)}`,
      json.verified ? "proved free of races and deadlocks" : "NOT proved",
      `computes the graph: ${json.computes_graph}`,
    ];
  }

  // The whole time of all workers, divided by their number: so the parts add up to the step.
  function whereTimeGoes(schedule) {
    const run = schedule.predicted, workers = schedule.json.workers;
    const kinds = S.timeByKind(schedule, run), rest = S.restOf(schedule, run);
    const perRank = schedule.json.target.bytes_per_us * schedule.json.ranks / 1000;
    const cell = (ns) => formatNumber(ns / workers / 1000, 2);
    const row = (name, own) => [name, own.count.toLocaleString("en"), formatBytes(own.bytes),
      formatNumber(own.bytes / perRank / 1000, 2), cell(own.load), cell(own.compute), cell(own.fixed), cell(own.wait),
      cell(own.load + own.compute + own.fixed + own.wait)];
    const sum = { count: 0, bytes: 0, load: 0, compute: 0, fixed: 0, wait: 0 };
    for (const own of kinds) for (const name of Object.keys(sum)) sum[name] += own[name];
    return [
      element("h2", {}, "Where the time goes"),
      element("p", { class: "quiet" },
        "µs of the step: the time of all workers divided by their number, so the last column adds up to the step. ",
        "“At full bandwidth” is the time of the bytes if all workers of all ranks load all the time. ",
        "Loads can take less, because workers that load share the bandwidth of those that do not."),
      numbers(["kind", "count", "bytes", "at full bandwidth", "loading", "arithmetic beyond loading", "fixed overhead", "waiting", "in all"], [
        ...kinds.map((own) => row(kindMark(schedule, own.kind), own)),
        ["nothing left to do", "", "", "", "", "", "", cell(rest), cell(rest)],
        row(element("strong", {}, "the step"), { ...sum, wait: sum.wait + rest }),
      ]),
    ];
  }

  function whyIdle(schedule, run) {
    const each = S.idleByCause(schedule, run), rest = S.restOf(schedule, run);
    const whole = each.reduce((sum, own) => sum + own.idle, 0) + rest;
    const cell = (ns) => [formatNumber(ns / schedule.json.workers / 1000, 2), percent(ns, whole)];
    return [
      element("h2", {}, run === schedule.predicted ? "Why workers are idle" : `Why workers are idle (${run.name})`),
      element("p", { class: "quiet" }, "Each gap ends with an instruction. Its last wait ended when another instruction, of the kind in the first column, had finished. µs per worker."),
      numbers(["waiting for", "to start", "gaps", "µs per worker", "share of idle time"], [
        ...each.map((own) => [own.by < 0 ? "nothing: its counters were reached" : kindMark(schedule, own.by),
          kindMark(schedule, own.kind), own.count.toLocaleString("en"), ...cell(own.idle)]),
        ["nothing left to do", "", "", ...cell(rest)],
        [element("strong", {}, "in all"), "", "", ...cell(whole)],
      ], 2),
    ];
  }

  function whatWaits(schedule, run, layer) {
    const { kinds, longest } = S.waitsOf(schedule, run, layer, 20);
    const released = D.releasedBy(schedule, run), early = (number) => released[number];
    return [
      numbers(["kind", "instructions", "of them waited", "idle before, on all workers together", "on average", "longest"],
        kinds.map((own) => [kindMark(schedule, own.kind), own.count.toLocaleString("en"), own.waited.toLocaleString("en"),
          us(own.idle), us(own.waited ? own.idle / own.waited : 0),
          linkTo(schedule, own.longest, us(run.idle[own.longest]))])),
      element("h3", {}, "The longest"),
      longest.length ? fewRows(["instruction", "waited", "for"], longest, (number) => [
        linkTo(schedule, number), us(run.idle[number]),
        early(number) < 0 ? "" : linkTo(schedule, early(number))])
        : element("p", {}, "No worker was idle before an instruction of this layer."),
    ];
  }

  function criticalPath(schedule) {
    const run = schedule.predicted, each = [...schedule.columns.chain], kinds = new Map();
    for (const number of each) {
      const own = kinds.get(schedule.kind[number]) || { count: 0, time: 0 };
      kinds.set(schedule.kind[number], own);
      own.count += 1;
      own.time += run.finish[number] - run.start[number];
    }
    return [
      element("h2", {}, "The critical path"),
      element("p", { class: "quiet" }, "Each instruction starts when the one before it has finished. The path ends with the step."),
      numbers(["kind", "instructions", "time", "share of the step"],
        [...kinds].sort((a, b) => b[1].time - a[1].time).map(([kind, own]) =>
          [kindMark(schedule, kind), own.count.toLocaleString("en"), us(own.time), percent(own.time, run.end)])),
      element("details", {}, element("summary", {}, `Its ${count(each.length, "instruction")}`),
        fewRows(["instruction", "start", "takes"], each, (number) =>
          [linkTo(schedule, number), us(run.start[number]), us(run.finish[number] - run.start[number])])),
    ];
  }

  function predictedAndMeasured(schedule, runs) {
    const [one, other] = runs, rows = schedule.json.kinds.map(() => [0, 0, 0, 0, 0]);
    for (let i = 0; i < schedule.count; i++) {
      const own = rows[schedule.kind[i]];
      own[0] += 1;
      own[1] += one.finish[i] - one.start[i];
      own[2] += other.finish[i] - other.start[i];
      own[3] += one.idle[i];
      own[4] += other.start[i] - other.begin[i];
    }
    const ratio = (a, b) => b ? formatNumber(a / b, 2) : "";
    return [
      element("h2", {}, `Predicted and ${other.name}`),
      element("p", { class: "quiet" }, "Sums over all workers. A measured wait is the time from taking an instruction to having its counters."),
      numbers(["kind", "count", "predicted", "measured", "predicted / measured", "predicted wait", "measured wait"], [
        ...rows.map((own, kind) => [kindMark(schedule, kind), own[0].toLocaleString("en"), us(own[1], 1), us(own[2], 1),
          ratio(own[1], own[2]), us(own[3], 1), us(own[4], 1)]),
        [element("strong", {}, "the step, from start to end"), "", us(one.end, 1), us(other.end, 1), ratio(one.end, other.end), "", ""],
      ]),
    ];
  }

  function faults(json) {
    if (json.verified) return [];
    return [
      element("h2", {}, "Faults"),
      element("p", {}, `The verifier refused this program: ${count(json.fault_count, "fault")}.`),
      table(["rule", "what is wrong"], json.faults.map(({ rule, said }) => [rule, said])),
    ];
  }

  return {
    us, kindMark, instruction, workerText, figures, whereTimeGoes, whyIdle, whatWaits, criticalPath,
    predictedAndMeasured, faults,
  };
})();
