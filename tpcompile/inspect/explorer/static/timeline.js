// The timeline's picture: one row per worker, one rectangle per instruction, time from left to right.
//
// Rectangles are written into an array of pixels, row by row, which is much faster than one call per
// rectangle. If rows or instructions are narrower than a pixel, pixels have the mean colour of what
// they show; if too many instructions are visible, it comes from the cells of a level of detail.

const TimelinePicture = (() => {
"use strict";

class TimelinePicture {
  static GUTTER = 96;      // names of workers, in CSS pixels
  static AXIS = 34;        // times and layers
  static HEAD = 18;        // names of ranks
  static GAP = 6;
  static MOST_ROW = 28;
  static LEAST_NS = 40;    // the shortest visible time
  static MOST_RAW = 50_000;  // instructions that are drawn one by one

  constructor(schedule, canvas) {
    this.schedule = schedule;
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.layers = ScheduleSums.layersOf(schedule, schedule.predicted);
    this.showChain = false;
    this.selected = this.hovered = -1;
    this.readColours();
    this.setRuns([schedule.predicted]);
  }

  // ---- what is shown ----------------------------------------------------------------------------

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.colours = Object.fromEntries(["ink", "quiet", "paper", "panel", "line", "accent"]
      .map((name) => [name, read(`--${name}`)]));
    this.kinds = this.schedule.json.kinds.map((kind) => rgbOf(kind.colour));
    this.paper = rgbOf(this.colours.paper);
    this.packed = this.kinds.map(packed);
    this.flat = Float64Array.from(this.kinds.flat());
    for (const run of this.runs || []) for (const level of run.levels) level.pictures = null;
    if (this.runs) this.prepare();
  }

  // Show these runs of the program, one below the other.
  setRuns(runs) {
    this.runs = runs;
    for (const run of runs) run.levels ||= ScheduleSums.levelsOf(this.schedule, run);
    this.end = Math.max(1, ...runs.map((run) => run.end));
    this.from = Math.max(0, Math.min(this.from ?? 0, this.end - 1));
    this.to = Math.min(this.to ?? this.end, this.end);
    this.resize();
    this.fitRows();
  }

  resize() {
    this.ratio = Math.max(1, Math.min(2, window.devicePixelRatio || 1));
    this.width = Math.max(this.canvas.clientWidth, TimelinePicture.GUTTER + 50);
    this.height = Math.max(this.canvas.clientHeight, TimelinePicture.AXIS + 50);
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.plotWidth = this.width - TimelinePicture.GUTTER;
    this.plotHeight = this.height - TimelinePicture.AXIS;
    const wide = Math.round(this.plotWidth * this.ratio), high = Math.round(this.plotHeight * this.ratio);
    this.image = new ImageData(wide, high);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.sums = new Float64Array(4 * (wide + 2));
  }

  // Choose the height of rows with which all workers are visible.
  fitRows() {
    const ranks = this.runs.length * this.schedule.json.ranks;
    this.head = ranks > 1 ? TimelinePicture.HEAD : 0;
    const room = this.plotHeight - ranks * (this.head + TimelinePicture.GAP);
    this.least = Math.max(0.1, room / (this.runs.length * this.schedule.json.workers));
    this.setRow(Math.min(this.least, TimelinePicture.MOST_ROW), 0);
  }

  // Set the height of a row. The place at `y` of the plot stays where it is.
  setRow(height, y) {
    const before = this.bands ? this.workerAt(y) : null;
    this.row = Math.max(Math.min(this.least, TimelinePicture.MOST_ROW), Math.min(height, TimelinePicture.MOST_ROW));
    this.bands = [];
    let top = 0;
    for (const run of this.runs)
      for (let rank = 0; rank < this.schedule.json.ranks; rank++) {
        this.bands.push({ run, rank, head: top, top: top + this.head });
        top += this.head + this.schedule.perRank * this.row + TimelinePicture.GAP;
      }
    this.content = top;
    if (before) this.top = this.bands[before.band].top + before.row * this.row - y;
    this.scrollTo(this.top || 0);
    this.prepare();
  }

  scrollTo(top) {
    this.top = Math.max(0, Math.min(top, this.content - this.plotHeight));
  }

  // Show this time. It is moved into the step, and is never empty.
  setWindow(from, to) {
    const span = Math.max(Math.min(TimelinePicture.LEAST_NS, this.end), Math.min(to - from, this.end));
    const middle = (from + to) / 2;
    this.from = Math.max(0, Math.min(middle - span / 2, this.end - span));
    this.to = this.from + span;
  }

  zoom(factor, x = TimelinePicture.GUTTER + this.plotWidth / 2) {
    const at = this.timeAt(x), span = (this.to - this.from) * factor;
    const share = (at - this.from) / (this.to - this.from);
    const bounded = Math.max(TimelinePicture.LEAST_NS, Math.min(span, this.end));
    this.setWindow(at - share * bounded, at + (1 - share) * bounded);
  }

  pan(pixels) {
    const step = pixels * (this.to - this.from) / this.plotWidth;
    this.setWindow(this.from + step, this.to + step);
  }

  // Return whether a part of an instruction is in the visible time.
  shows(number) {
    const run = this.runs[0];
    return number >= 0 && run.finish[number] > this.from && run.start[number] < this.to;
  }

  // Make an instruction visible in the first run.
  reveal(number) {
    const run = this.runs[0], span = this.to - this.from;
    const start = run.start[number], finish = run.finish[number];
    const wanted = Math.max(finish - start, 1) * 12;
    if (start < this.from || finish > this.to || finish - start < span / 400) {
      const use = Math.max(Math.min(span, wanted * 4), wanted);
      this.setWindow((start + finish) / 2 - use / 2, (start + finish) / 2 + use / 2);
    }
    const y = this.rowTop(0, run.worker[number]);
    if (y < this.top || y + this.row > this.top + this.plotHeight) this.scrollTo(y - this.plotHeight / 2);
  }

  // ---- places -----------------------------------------------------------------------------------

  xOf(moment) {
    return TimelinePicture.GUTTER + (moment - this.from) / (this.to - this.from) * this.plotWidth;
  }

  timeAt(x) {
    return this.from + (x - TimelinePicture.GUTTER) / this.plotWidth * (this.to - this.from);
  }

  rowTop(run, worker) {
    const rank = Math.floor(worker / this.schedule.perRank);
    const band = this.bands[run * this.schedule.json.ranks + rank];
    return band.top + (worker - rank * this.schedule.perRank) * this.row;
  }

  // Return the band and the row (a fraction) at `y` of the plot.
  workerAt(y) {
    const place = y + (this.top || 0);
    let band = 0;
    while (band + 1 < this.bands.length && this.bands[band + 1].head <= place) band++;
    return { band, row: (place - this.bands[band].top) / this.row };
  }

  // Return what is at a point of the canvas: {run, worker, moment, number, idle}, or null. `number`
  // is the instruction, or the next one if the worker is idle (-1: it has nothing left to do).
  at(x, y) {
    if (x < TimelinePicture.GUTTER || y < TimelinePicture.AXIS || x > this.width) return null;
    const { band, row } = this.workerAt(y - TimelinePicture.AXIS);
    if (row < 0 || row >= this.schedule.perRank) return null;
    const { run, rank } = this.bands[band], moment = this.timeAt(x);
    const worker = rank * this.schedule.perRank + Math.floor(row);
    const place = firstAfter(run, worker, moment);
    const number = place < run.rowAt[worker + 1] ? run.rows[place] : -1;
    return { run, worker, moment, number, idle: number < 0 || run.start[number] > moment };
  }

  // ---- drawing ----------------------------------------------------------------------------------

  // Draw in the next frame.
  ask() {
    this.asked ||= requestAnimationFrame(() => { this.asked = 0; this.draw(); });
  }

  draw() {
    const { context, ratio } = this, plot = [TimelinePicture.GUTTER * ratio, TimelinePicture.AXIS * ratio];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = this.colours.paper;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    const coarse = this.chooseLevels();
    this.level = coarse;
    if (coarse) this.drawLevels(coarse);
    else {
      this.pixels.fill(packed(this.paper));
      for (const band of this.bands) this.drawBand(band);
      context.putImageData(this.image, Math.round(plot[0]), Math.round(plot[1]));
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.clipped(() => {
      this.drawLayers();
      if (this.row >= 12) this.drawLabels();
      if (this.showChain) this.drawChain();
      this.drawMarks();
    });
    this.drawNames();
    this.drawAxis();
    if (this.onDraw) this.onDraw();
  }

  clipped(draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(TimelinePicture.GUTTER, TimelinePicture.AXIS, this.plotWidth, this.plotHeight);
    this.context.clip();
    draw();
    this.context.restore();
  }

  // Return the level for each run if so much time is visible, or null if instructions are drawn one
  // by one. Rows of a level should be at least as high as a pixel, and cells about as wide as one.
  chooseLevels(span = this.to - this.from) {
    const shown = Math.min(1, this.plotHeight / this.content) * span / this.end;
    if (shown * this.schedule.count * this.runs.length <= TimelinePicture.MOST_RAW) return null;
    const pixel = span / (this.plotWidth * this.ratio);
    const found = new Map();
    for (const run of this.runs) {
      const level = run.levels.find(({ group, width }) =>
        group * this.row * this.ratio >= 0.8 && width <= 1.6 * pixel);
      if (!level) return null;
      found.set(run, level);
    }
    return found;
  }

  // Make the pictures of the levels that zooming can show, one at a time, while the page is idle.
  prepare() {
    clearTimeout(this.preparing);
    const next = () => {
      for (let span = this.end, levels; (levels = this.chooseLevels(span)); span *= 0.75)
        for (const [run, level] of levels)
          for (let rank = 0; rank < this.schedule.json.ranks; rank++)
            if (!level.pictures?.[rank]) {
              this.pictureOf(run, level, rank);
              this.preparing = setTimeout(next, 5);
              return;
            }
    };
    this.preparing = setTimeout(next, 50);
  }

  drawLevels(levels) {
    const { context, ratio } = this;
    this.clipped(() => {
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.beginPath();
      context.rect(TimelinePicture.GUTTER, TimelinePicture.AXIS, this.plotWidth, this.plotHeight);
      context.clip();
      context.imageSmoothingEnabled = true;
      for (const { run, rank, top } of this.bands) {
        const level = levels.get(run), picture = this.pictureOf(run, level, rank);
        const y = TimelinePicture.AXIS + top - this.top, high = level.group * this.row;
        if (y > this.height || y + level.rows * high < TimelinePicture.AXIS) continue;
        const left = this.from / level.width, wide = (this.to - this.from) / level.width;
        const used = Math.min(wide, level.bins - left);
        context.drawImage(picture, left, 0, used, level.rows,
          TimelinePicture.GUTTER, y, this.plotWidth * used / wide, this.schedule.perRank * this.row);
      }
    });
  }

  // Return the picture of one rank of a level, one pixel per cell.
  pictureOf(run, level, rank) {
    level.pictures ||= [];
    if (level.pictures[rank]) return level.pictures[rank];
    const { cells, rows, bins, width, group } = ScheduleSums.fill(this.schedule, run, level);
    const image = new ImageData(bins, rows), pixels = new Uint32Array(image.data.buffer);
    const kinds = this.kinds.length, colours = this.flat, [red, green, blue] = this.paper;
    for (let row = 0, at = rank * rows * bins * kinds; row < rows; row++) {
      const workers = Math.min(group, this.schedule.perRank - row * group);
      for (let bin = 0; bin < bins; bin++) {
        const whole = Math.min(width, run.end - bin * width) * workers;
        let rest = whole, r = 0, g = 0, b = 0;
        for (let kind = 0; kind < kinds; kind++, at++) {
          const time = cells[at];
          if (!time) continue;
          rest -= time;
          r += time * colours[3 * kind];
          g += time * colours[3 * kind + 1];
          b += time * colours[3 * kind + 2];
        }
        pixels[row * bins + bin] = 0xff000000 | (b + rest * blue) / whole << 16
          | (g + rest * green) / whole << 8 | (r + rest * red) / whole;
      }
    }
    const canvas = document.createElement("canvas");
    canvas.width = bins;
    canvas.height = rows;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return level.pictures[rank] = canvas;
  }

  drawBand({ run, rank, top }) {
    const high = this.image.height, { perRank } = this.schedule, row = this.row * this.ratio;
    const origin = (top - this.top) * this.ratio;
    const first = Math.max(0, Math.floor(-origin / row));
    const last = Math.min(perRank - 1, Math.floor((high - 1 - origin) / row));
    let pending = [], line = -1;
    for (let place = first; place <= last; place++) {
      const y = Math.floor(origin + place * row);
      if (row >= 2) { this.drawRow(run, [rank * perRank + place], y, Math.floor(origin + (place + 1) * row)); continue; }
      if (y !== line && pending.length) { this.drawRow(run, pending, line, line + 1); pending = []; }
      line = y;
      pending.push(rank * perRank + place);
    }
    if (pending.length) this.drawRow(run, pending, line, line + 1);
  }

  // Draw workers in one row of pixels, or one worker in several.
  drawRow(run, workers, top, bottom) {
    const wide = this.image.width, high = this.image.height;
    const scale = wide / (this.to - this.from), from = this.from;
    const gap = bottom - top >= 5 ? 1 : 0;
    const y0 = Math.max(0, top), y1 = Math.min(high, bottom - gap);
    if (y0 >= y1) return;
    let dense = workers.length > 1;
    const worker = workers[0], begin = firstAfter(run, worker, from), end = run.rowAt[worker + 1];
    if (!dense) {
      const visible = firstAfter(run, worker, this.to) - begin + 1;
      dense = visible * 3 > wide;
    }
    if (dense) return this.drawMeans(run, workers, y0, y1, scale);
    const first = y0 * wide;
    for (let at = begin; at < end; at++) {
      if (run.starts[at] >= this.to) break;
      const left = Math.max(0, Math.floor((run.starts[at] - from) * scale));
      let right = Math.min(wide, Math.floor((run.finishes[at] - from) * scale));
      if (right - left > 4) right -= 1;
      if (right <= left) right = Math.min(wide, left + 1);
      this.pixels.fill(this.packed[run.kinds[at]], first + left, first + right);
    }
    for (let y = y0 + 1; y < y1; y++) this.pixels.copyWithin(y * wide, first, first + wide);
  }

  // Write the mean colours of some workers. `sums` hold the changes of the mean from pixel to pixel,
  // so that the work does not depend on the widths of instructions.
  drawMeans(run, workers, y0, y1, scale) {
    const wide = this.image.width, { sums, flat } = this;
    const { starts, finishes, kinds } = run, { from, to } = this;
    sums.fill(0);
    const change = (x, part, r, g, b) => {
      const at = 4 * x;
      sums[at] += part * r;
      sums[at + 1] += part * g;
      sums[at + 2] += part * b;
      sums[at + 3] += part;
    };
    for (const worker of workers) {
      const end = run.rowAt[worker + 1];
      for (let at = firstAfter(run, worker, from); at < end; at++) {
        if (starts[at] >= to) break;
        const left = Math.max(0, (starts[at] - from) * scale);
        const right = Math.min(wide, (finishes[at] - from) * scale);
        const x0 = Math.floor(left), x1 = Math.floor(right), one = left - x0, other = right - x1;
        const own = 3 * kinds[at], r = flat[own], g = flat[own + 1], b = flat[own + 2];
        change(x0, 1 - one, r, g, b);
        change(x0 + 1, one, r, g, b);
        change(x1, other - 1, r, g, b);
        change(x1 + 1, -other, r, g, b);
      }
    }
    const count = workers.length, [red, green, blue] = this.paper;
    let r = 0, g = 0, b = 0, busy = 0;
    for (let x = 0, at = y0 * wide; x < wide; x++, at++) {
      r += sums[4 * x];
      g += sums[4 * x + 1];
      b += sums[4 * x + 2];
      busy += sums[4 * x + 3];
      const rest = Math.max(0, count - busy);
      this.pixels[at] = 0xff000000 | Math.min(255, (b + rest * blue) / count) << 16
        | Math.min(255, (g + rest * green) / count) << 8 | Math.min(255, (r + rest * red) / count);
    }
    for (let y = y0 + 1; y < y1; y++) this.pixels.copyWithin(y * wide, y0 * wide, (y0 + 1) * wide);
  }

  // ---- what is drawn over the rectangles ----------------------------------------------------------

  drawLabels() {
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = "#1a1a1a";
    context.textBaseline = "middle";
    const letter = context.measureText("norm_gate_up_swiglu rows=0:96").width / 29;
    this.eachVisible((run, number, x, right, y) => {
      if (right - x < 46) return;
      const left = Math.max(x, TimelinePicture.GUTTER) + 4, room = right - left - 3;
      const whole = room > 150 ? ScheduleData.label(this.schedule, number)
        : this.schedule.json.kinds[this.schedule.kind[number]].text;
      const most = Math.floor(room / letter);
      if (most < 5) return;
      context.fillText(whole.length > most ? `${whole.slice(0, most - 1)}…` : whole, left, y + this.row / 2);
    });
  }

  // Call back for each visible instruction, if rows are high enough to have names.
  eachVisible(draw) {
    for (const { run, rank, top } of this.bands) {
      const y = TimelinePicture.AXIS + top - this.top, { perRank } = this.schedule;
      const first = Math.max(0, Math.floor((TimelinePicture.AXIS - y) / this.row));
      const last = Math.min(perRank - 1, Math.floor((this.height - y) / this.row));
      for (let place = first; place <= last; place++) {
        const worker = rank * perRank + place;
        for (let at = firstAfter(run, worker, this.from); at < run.rowAt[worker + 1]; at++) {
          const number = run.rows[at];
          if (run.start[number] >= this.to) break;
          draw(run, number, this.xOf(run.start[number]), this.xOf(run.finish[number]), y + place * this.row);
        }
      }
    }
  }

  // Outline the critical path and connect its instructions.
  drawChain() {
    const { context } = this, run = this.schedule.predicted, place = this.runs.indexOf(run);
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    const path = new Path2D();
    let before = null;
    for (const number of this.schedule.columns.chain) {
      const y = TimelinePicture.AXIS + this.rowTop(place, run.worker[number]) - this.top;
      const x = this.xOf(run.start[number]), right = this.xOf(run.finish[number]);
      const visible = right >= TimelinePicture.GUTTER && x <= this.width;
      if (visible && before) { path.moveTo(before.right, before.y + this.row / 2); path.lineTo(x, y + this.row / 2); }
      if (visible) path.rect(x, y, Math.max(right - x, 1), Math.max(this.row - 1, 1));
      before = { right, y };
    }
    context.stroke(path);
  }

  drawMarks() {
    const { context } = this;
    for (const [number, colour, width] of [[this.hovered, this.colours.ink, 1.5], [this.selected, this.colours.accent, 3]])
      if (number >= 0)
        this.runs.forEach((run, place) => {
          const y = TimelinePicture.AXIS + this.rowTop(place, run.worker[number]) - this.top;
          const x = this.xOf(run.start[number]), right = this.xOf(run.finish[number]);
          context.strokeStyle = colour;
          context.lineWidth = width;
          context.strokeRect(x - 1, y - 1, Math.max(right - x, 2) + 2, Math.max(this.row, 3) + 1);
          const early = run === this.schedule.predicted ? this.schedule.columns.released_by[number] : -1;
          if (early < 0 || number !== this.selected) return;
          const above = TimelinePicture.AXIS + this.rowTop(place, run.worker[early]) - this.top;
          context.beginPath();
          context.moveTo(this.xOf(run.finish[early]), above + this.row / 2);
          context.lineTo(x, y + this.row / 2);
          context.stroke();
          context.strokeRect(this.xOf(run.start[early]), above, Math.max(this.xOf(run.finish[early]) - this.xOf(run.start[early]), 2), Math.max(this.row, 2));
        });
  }

  // Return the layers whose names have room, each with its place.
  namedLayers() {
    const found = [];
    let free = -Infinity;
    for (const { layer, start } of this.layers) {
      const x = this.xOf(start);
      if (x < TimelinePicture.GUTTER - 1 || x < free || x > this.width - 40) continue;
      found.push({ layer, x });
      free = x + 54;
    }
    return found;
  }

  drawLayers() {
    const { context } = this;
    context.strokeStyle = this.colours.quiet;
    context.lineWidth = 0.5;
    context.beginPath();
    for (const { x } of this.namedLayers()) {
      context.moveTo(Math.round(x) + 0.5, TimelinePicture.AXIS);
      context.lineTo(Math.round(x) + 0.5, this.height);
    }
    context.stroke();
  }

  drawNames() {
    const { context } = this;
    context.fillStyle = this.colours.paper;
    context.fillRect(0, TimelinePicture.AXIS, TimelinePicture.GUTTER - 1, this.plotHeight);
    context.save();
    context.beginPath();
    context.rect(0, TimelinePicture.AXIS, this.width, this.plotHeight);
    context.clip();
    context.textBaseline = "middle";
    for (const { run, rank, head, top } of this.bands) {
      const y = TimelinePicture.AXIS + head - this.top;
      if (y > this.height || y + this.head + this.schedule.perRank * this.row < TimelinePicture.AXIS) continue;
      if (this.head) {
        context.font = "bold 12px system-ui, sans-serif";
        context.fillStyle = this.colours.ink;
        const name = this.runs.length > 1 ? `rank ${rank}, ${run.name}` : `rank ${rank}`;
        context.fillText(name, 6, y + this.head / 2 + 1);
      }
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = this.colours.quiet;
      const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((step) => step * this.row >= 13) || 1024;
      for (let worker = 0; worker < this.schedule.perRank; worker += every) {
        const middle = TimelinePicture.AXIS + top - this.top + (worker + 0.5) * this.row;
        const inside = middle + 6 <= TimelinePicture.AXIS + top - this.top + this.schedule.perRank * this.row + 8;
        if (inside && middle > TimelinePicture.AXIS && middle < this.height)
          context.fillText(`worker ${worker}`, 14, Math.max(middle, TimelinePicture.AXIS + top - this.top + 6));
      }
    }
    context.restore();
  }

  drawAxis() {
    const { context } = this;
    context.fillStyle = this.colours.panel;
    context.fillRect(0, 0, this.width, TimelinePicture.AXIS - 1);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = this.colours.quiet;
    const step = niceStep((this.to - this.from) / Math.max(2, this.plotWidth / 110));
    const digits = Math.max(0, Math.min(3, Math.ceil(-Math.log10(step / 1000))));
    for (let moment = Math.ceil(this.from / step) * step; moment <= this.to; moment += step) {
      const text = `${(moment / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} µs`;
      const x = this.xOf(moment);
      context.fillRect(Math.round(x), 12, 1, 5);
      context.fillText(text, Math.min(x + 3, this.width - 7 * text.length), 8);
    }
    for (const { layer, x } of this.namedLayers()) context.fillText(`layer ${layer}`, x + 3, 25);
  }
}

// Return the place in `rows` of the first instruction of a worker that finishes after a moment.
function firstAfter(run, worker, moment) {
  let low = run.rowAt[worker], high = run.rowAt[worker + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.finishes[middle] > moment) high = middle;
    else low = middle + 1;
  }
  return low;
}

function rgbOf(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

// Return a colour as a pixel of an image: bytes in the order red, green, blue, opaque.
function packed([red, green, blue]) {
  return (0xff000000 | blue << 16 | green << 8 | red) >>> 0;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least));
}

return TimelinePicture;
})();
