// The schedule: columns → one object, and questions about single instructions. Pure functions.
// An instruction is a number. Times are whole ns.

const ScheduleData = (() => {
  "use strict";

  // Return where each element's part of a concatenated column begins, and where the last one ends.
  function offsets(lengths) {
    const found = new Uint32Array(lengths.length + 1);
    for (let i = 0; i < lengths.length; i++) found[i + 1] = found[i] + lengths[i];
    return found;
  }

  function spread(column, group) {
    const found = new column.constructor(group.length);
    for (let i = 0; i < group.length; i++) found[i] = column[group[i]];
    return found;
  }

  // Decode the schedule. `json` is its part of the page's data.
  function decode(json, columns) {
    const count = columns.group.length;
    const kind = spread(columns.group_kind, columns.group);
    const nth = new Uint32Array(count);   // the place of each instruction among those of its kind
    const met = new Uint32Array(json.kinds.length);
    for (let i = 0; i < count; i++) nth[i] = met[kind[i]]++;
    const lengths = new Uint32Array(count);
    for (let i = 0; i < count; i++) lengths[i] = columns.reads[i] + columns.writes[i] + columns.joins[i];
    const onChain = new Uint8Array(count);
    for (const number of columns.chain) onChain[number] = 1;
    const schedule = {
      json, columns, count, kind, nth, onChain,
      layer: spread(columns.group_layer, columns.group),
      rank: spread(columns.group_rank, columns.group),
      words: spread(columns.group_words, columns.group),
      perRank: json.workers / json.ranks,
      accessAt: offsets(lengths), waitAt: offsets(columns.waits), signalAt: offsets(columns.signals),
      edgeAt: offsets(columns.box_dims.map((dims) => 2 * dims)),
      counts: met,
    };
    schedule.predicted = run(schedule, "predicted", columns.start, columns.finish, columns.worker, null);
    return schedule;
  }

  // Return a run of the program: when and where each instruction ran. `rows` are the instructions
  // worker by worker, in order of time, and `starts`, `finishes` and `kinds` are in the order of
  // `rows`, so that they are read in sequence. `idle` is the time between an instruction and the one
  // before on its worker.
  function run(schedule, name, start, finish, worker, begin) {
    const count = schedule.count;
    const sizes = new Uint32Array(schedule.json.workers);
    for (let i = 0; i < count; i++) sizes[worker[i]]++;
    const rowAt = offsets(sizes);
    const place = rowAt.slice();
    const rows = new Uint32Array(count);
    for (let i = 0; i < count; i++) rows[place[worker[i]]++] = i;
    for (let w = 0; w < sizes.length; w++)
      rows.subarray(rowAt[w], rowAt[w + 1]).sort((a, b) => start[a] - start[b] || finish[a] - finish[b]);
    const idle = new Float64Array(count), position = new Uint32Array(count);
    const starts = new start.constructor(count), finishes = new finish.constructor(count);
    const kinds = new schedule.kind.constructor(count);
    let end = 0;
    for (let w = 0; w < sizes.length; w++) {
      let free = 0;
      for (let at = rowAt[w]; at < rowAt[w + 1]; at++) {
        const i = rows[at];
        position[i] = at;
        starts[at] = start[i];
        finishes[at] = finish[i];
        kinds[at] = schedule.kind[i];
        idle[i] = Math.max(0, start[i] - free);
        free = Math.max(free, finish[i]);
      }
      end = Math.max(end, free);
    }
    return { name, start, finish, worker, begin, rows, rowAt, starts, finishes, kinds, position, idle, end };
  }

  // Return the run of a measured step.
  function measured(schedule, step) {
    const column = (name) => schedule.columns[`measured_${step}_${name}`];
    const [begin, wait, time] = ["begin", "wait", "run"].map(column);
    const start = Float64Array.from(begin, (moment, i) => moment + wait[i]);
    const finish = start.map((moment, i) => moment + time[i]);
    return run(schedule, `measured, step ${step + 1}`, start, finish, column("worker"), begin);
  }

  // Return the neighbour of an instruction on its worker, or -1.
  function neighbour(which, number, step) {
    const at = which.position[number] + step, worker = which.worker[number];
    return at < which.rowAt[worker] || at >= which.rowAt[worker + 1] ? -1 : which.rows[at];
  }

  function operands(schedule, number) {
    const kind = schedule.kind[number], nth = schedule.nth[number];
    return schedule.json.kinds[kind].fields.map(({ name, range }) => {
      const column = schedule.columns[`own_${kind}_${name}`];
      return [name, range ? `${column[2 * nth]}:${column[2 * nth + 1]}` : String(column[nth])];
    });
  }

  // Return the description of a group of instructions: name, words, layer and rank.
  function groupText(schedule, group) {
    const columns = schedule.columns, layer = columns.group_layer[group];
    const words = schedule.json.words[columns.group_words[group]];
    return [schedule.json.kinds[columns.group_kind[group]].name, words,
      layer < 0 ? "" : `layer ${layer}`, `rank ${columns.group_rank[group]}`].filter(Boolean).join(" ");
  }

  function label(schedule, number) {
    const own = operands(schedule, number).map(([name, value]) => `${name}=${value}`);
    return [groupText(schedule, schedule.columns.group[number]), ...own].join(" ");
  }

  // Return the accesses of an instruction: how, the buffer's number, and the number of the box.
  function accesses(schedule, number) {
    const columns = schedule.columns, found = [];
    let at = schedule.accessAt[number];
    for (const [how, length] of [["read", columns.reads[number]], ["write", columns.writes[number]],
      ["join", columns.joins[number]]])
      for (let i = 0; i < length; i++, at++)
        found.push({ how, buffer: columns.access_buffer[at], box: boxOf(schedule, columns.access_box[at]) });
    return found;
  }

  function boxOf(schedule, box) {
    const edges = schedule.columns.box_edges, found = [];
    for (let at = schedule.edgeAt[box]; at < schedule.edgeAt[box + 1]; at += 2)
      found.push([edges[at], edges[at + 1]]);
    return found;
  }

  function boxText(box) {
    return `[${box.map(([start, stop]) => `${start}:${stop}`).join(", ")}]`;
  }

  function bufferText(schedule, buffer) {
    const like = schedule.json.buffers[schedule.columns.buffer_like[buffer]];
    const rank = schedule.json.ranks > 1 ? ` of rank ${schedule.columns.buffer_rank[buffer]}` : "";
    return `${like.name}${rank}`;
  }

  // Return the instructions that signal each counter; the index is made once.
  function signallers(schedule, counter) {
    if (!schedule.signalled) {
      const lengths = new Uint32Array(schedule.json.counters);
      for (const one of schedule.columns.signal_counter) lengths[one]++;
      const at = offsets(lengths), place = at.slice();
      const members = new Uint32Array(schedule.columns.signal_counter.length);
      for (let i = 0; i < schedule.count; i++)
        for (let s = schedule.signalAt[i]; s < schedule.signalAt[i + 1]; s++)
          members[place[schedule.columns.signal_counter[s]]++] = i;
      schedule.signalled = { at, members };
    }
    const { at, members } = schedule.signalled;
    return members.subarray(at[counter], at[counter + 1]);
  }

  // Return the waits of an instruction. A wait until 0 or less is for signals of the step before.
  function waits(schedule, number) {
    const found = [];
    for (let at = schedule.waitAt[number]; at < schedule.waitAt[number + 1]; at++) {
      const counter = schedule.columns.wait_counter[at];
      found.push({ counter, until: schedule.columns.wait_until[at], by: signallers(schedule, counter) });
    }
    return found;
  }

  function signals(schedule, number) {
    return schedule.columns.signal_counter.slice(schedule.signalAt[number], schedule.signalAt[number + 1]);
  }

  // Return the instructions that wait for a counter of this instruction, by counter.
  function waiters(schedule, counter) {
    if (!schedule.waited) {
      const lengths = new Uint32Array(schedule.json.counters);
      for (const one of schedule.columns.wait_counter) lengths[one]++;
      const at = offsets(lengths), place = at.slice();
      const members = new Uint32Array(schedule.columns.wait_counter.length);
      for (let i = 0; i < schedule.count; i++)
        for (let w = schedule.waitAt[i]; w < schedule.waitAt[i + 1]; w++)
          members[place[schedule.columns.wait_counter[w]]++] = i;
      schedule.waited = { at, members };
    }
    const { at, members } = schedule.waited;
    return members.subarray(at[counter], at[counter + 1]);
  }

  // Return, for each instruction, the one whose signal ended its last wait in a run, or -1. A tie goes
  // to the first instruction. The data have those of the predicted run, which are exact.
  function releasedBy(schedule, which) {
    if (which === schedule.predicted) return schedule.columns.released_by;
    if (which.releasedBy) return which.releasedBy;
    const { finish } = which, ended = new Map(), later = (a, b) => finish[a] - finish[b] || b - a;
    const enderOf = (counter, until) => {
      const key = `${counter} ${until}`;
      if (!ended.has(key)) ended.set(key, [...signallers(schedule, counter)].sort(later)[until - 1]);
      return ended.get(key);
    };
    const found = which.releasedBy = new Int32Array(schedule.count).fill(-1);
    for (let i = 0; i < schedule.count; i++)
      for (let at = schedule.waitAt[i]; at < schedule.waitAt[i + 1]; at++) {
        const until = schedule.columns.wait_until[at];
        if (until <= 0) continue;
        const early = enderOf(schedule.columns.wait_counter[at], until);
        if (found[i] < 0 || later(early, found[i]) > 0) found[i] = early;
      }
    return found;
  }

  function overlap(one, other) {
    const found = one.map(([start, stop], dim) =>
      [Math.max(start, other[dim][0]), Math.min(stop, other[dim][1])]);
    return found.every(([start, stop]) => start < stop) ? found : null;
  }

  // Return the regions through which `late` depends on `early`, which comes first in program order:
  // {hazard, buffer, box}. Two blocks of the same head are not ordered.
  function conflicts(schedule, early, late) {
    const found = new Map();
    const second = accesses(schedule, late);
    for (const a of accesses(schedule, early))
      for (const b of second) {
        if (a.buffer !== b.buffer || (a.how === "read" && b.how === "read")) continue;
        if (a.how === "join" && b.how === "join" && boxText(a.box) === boxText(b.box)) continue;
        const box = overlap(a.box, b.box);
        if (!box) continue;
        const hazard = `${a.how === "read" ? "read" : "write"} → ${b.how === "read" ? "read" : "write"}`;
        found.set(`${hazard} ${a.buffer} ${boxText(box)}`, { hazard, buffer: a.buffer, box });
      }
    return [...found.values()];
  }

  return {
    decode, measured, neighbour, operands, groupText, label, accesses, boxText, bufferText,
    signallers, waits, waiters, releasedBy, signals, conflicts,
  };
})();
