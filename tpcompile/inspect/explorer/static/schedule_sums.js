// Sums over a schedule: where the time goes, why workers are idle, what waits, and the levels of
// detail of the timeline. Pure functions of a decoded schedule. All sums of ns are exact.

const ScheduleSums = (() => {
  "use strict";

  const MOST_CELLS = 6_000_000;   // per level

  // Return, by kind, the parts of its instructions' time in ns. Together with `rest`, the time when
  // workers have nothing left to do, `load`, `compute`, `fixed` and `wait` add up to the whole time
  // of all workers. `load` is at most the time of the bytes at a worker's share of the bandwidth.
  function timeByKind(schedule, which) {
    const share = schedule.json.target.bytes_per_us / schedule.json.target.workers / 1000;
    const kinds = schedule.json.kinds.map((kind, number) => ({
      kind: number, count: 0, bytes: 0, load: 0, compute: 0, fixed: 0, wait: 0, busy: 0,
    }));
    const limits = schedule.json.parts.map(([, bytes]) => Math.round(bytes / share));
    for (let i = 0; i < schedule.count; i++) {
      const own = kinds[schedule.kind[i]], number = schedule.columns.parts[i];
      const parts = schedule.json.parts[number];
      const time = which.finish[i] - which.start[i];
      const fixed = Math.min(parts[0], time);
      const load = Math.min(limits[number], time - fixed);
      own.count += 1;
      own.bytes += parts[1];
      own.busy += time;
      own.fixed += fixed;
      own.load += load;
      own.compute += time - fixed - load;
      own.wait += which.idle[i];
    }
    return kinds;
  }

  // Return the time of all workers after their last instruction.
  function restOf(schedule, which) {
    let rest = 0;
    for (let w = 0; w < schedule.json.workers; w++) {
      const last = which.rowAt[w + 1] - 1;
      rest += which.end - (last < which.rowAt[w] ? 0 : which.finish[which.rows[last]]);
    }
    return rest;
  }

  // Return the idle time of workers by the kind of the instruction that ended it (-1: the worker did
  // not wait for one; measured steps have such gaps) and by the kind that waited, the longest first.
  function idleByCause(schedule, which) {
    const found = new Map(), released = ScheduleData.releasedBy(schedule, which);
    for (let i = 0; i < schedule.count; i++) {
      if (!which.idle[i]) continue;
      const early = released[i], kind = schedule.kind[i];
      const waited = early >= 0 && which.finish[early] > which.start[i] - which.idle[i];
      const by = waited ? schedule.kind[early] : -1;
      const key = by * schedule.json.kinds.length + kind;
      const own = found.get(key) || { by, kind, idle: 0, count: 0 };
      own.idle += which.idle[i];
      own.count += 1;
      found.set(key, own);
    }
    return [...found.values()].sort((a, b) => b.idle - a.idle);
  }

  // Return the waits of a layer (null: of all) by kind, and the instructions that wait longest.
  function waitsOf(schedule, which, layer, most) {
    const kinds = new Map(), longest = [];
    for (let i = 0; i < schedule.count; i++) {
      if (layer !== null && schedule.layer[i] !== layer) continue;
      const kind = schedule.kind[i];
      const own = kinds.get(kind) || { kind, count: 0, waited: 0, idle: 0, longest: i };
      kinds.set(kind, own);
      own.count += 1;
      if (!which.idle[i]) continue;
      own.waited += 1;
      own.idle += which.idle[i];
      if (which.idle[i] > which.idle[own.longest]) own.longest = i;
      if (longest.length < most || which.idle[i] > which.idle[longest[most - 1]]) {
        longest.push(i);
        longest.sort((a, b) => which.idle[b] - which.idle[a] || a - b);
        if (longest.length > most) longest.pop();
      }
    }
    return { kinds: [...kinds.values()].sort((a, b) => b.idle - a.idle), longest };
  }

  // Return when each layer begins and ends in a run: [{layer, start, finish}], in order of time.
  function layersOf(schedule, which) {
    const found = new Map();
    for (let i = 0; i < schedule.count; i++) {
      const layer = schedule.layer[i];
      if (layer < 0) continue;
      const own = found.get(layer);
      if (!own) found.set(layer, { layer, start: which.start[i], finish: which.finish[i] });
      else {
        if (which.start[i] < own.start) own.start = which.start[i];
        if (which.finish[i] > own.finish) own.finish = which.finish[i];
      }
    }
    return [...found.values()].sort((a, b) => a.start - b.start);
  }

  // ---- levels of detail -------------------------------------------------------------------------

  // Return the levels of a run, which are made when they are needed. A row of a level is `group`
  // neighbouring workers of a rank; a cell is the time that each kind takes there in `width` ns.
  function levelsOf(schedule, which) {
    const kinds = schedule.json.kinds.length, found = [];
    for (let group = 1; ; group *= 2) {
      const rows = Math.ceil(schedule.perRank / group);
      for (let bins = 512; bins <= 16384; bins *= 2) {
        const width = Math.max(1, Math.ceil(which.end / bins));
        const used = Math.max(1, Math.ceil(which.end / width));
        if (rows * schedule.json.ranks * used * kinds > MOST_CELLS) break;
        found.push({ group, rows, width, bins: used, cells: null, pictures: null });
        if (width === 1) break;
      }
      if (rows <= 1) return found;
    }
  }

  // Fill the cells of a level, if they are not yet: cells[((rank * rows + row) * bins + bin) * kinds + kind].
  function fill(schedule, which, level) {
    if (level.cells) return level;
    const { group, rows, width, bins } = level, kinds = schedule.json.kinds.length;
    const size = rows * schedule.json.ranks * bins * kinds;
    level.cells = width * group < 2 ** 31 ? new Int32Array(size) : new Float64Array(size);
    for (let i = 0; i < schedule.count; i++) {
      const rank = Math.floor(which.worker[i] / schedule.perRank);
      const row = rank * rows + Math.floor((which.worker[i] - rank * schedule.perRank) / group);
      const start = which.start[i], finish = which.finish[i], first = Math.floor(start / width);
      let at = (row * bins + first) * kinds + schedule.kind[i];
      for (let edge = first * width, from = start; from < finish; at += kinds) {
        edge += width;
        const to = edge < finish ? edge : finish;
        level.cells[at] += to - from;
        from = to;
      }
    }
    return level;
  }

  // Return the time that each kind takes in all cells of a level, in ns.
  function totals(schedule, which, level) {
    const { cells } = fill(schedule, which, level), kinds = schedule.json.kinds.length;
    const found = new Array(kinds).fill(0);
    for (let at = 0; at < cells.length; at++) found[at % kinds] += cells[at];
    return found;
  }

  // Return the time that the instructions of each kind take, in ns.
  function rawTotals(schedule, which) {
    const found = schedule.json.kinds.map(() => 0);
    for (let i = 0; i < schedule.count; i++) found[schedule.kind[i]] += which.finish[i] - which.start[i];
    return found;
  }

  return { timeByKind, restOf, idleByCause, waitsOf, layersOf, levelsOf, fill, totals, rawTotals };
})();
