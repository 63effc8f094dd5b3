// The timeline's picture: the visible time and workers, and the steps of drawing them.

const TimelinePicture = (() => {
"use strict";

const { firstAfter, rgbOf, packed, pictureOf, drawBand } = TimelinePixels;

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
    if (!this.canvas.clientWidth) return;   // another view is shown; it is drawn when this one is again
    const { context, ratio } = this, plot = [TimelinePicture.GUTTER * ratio, TimelinePicture.AXIS * ratio];
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = this.colours.paper;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    const coarse = this.chooseLevels();
    this.level = coarse;
    if (coarse) this.drawLevels(coarse);
    else {
      this.pixels.fill(packed(this.paper));
      for (const band of this.bands) drawBand(this, band);
      context.putImageData(this.image, Math.round(plot[0]), Math.round(plot[1]));
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.clipped(() => {
      TimelineMarks.drawLayers(this);
      if (this.row >= 12) TimelineMarks.drawLabels(this);
      if (this.showChain) TimelineMarks.drawChain(this);
      TimelineMarks.drawMarks(this);
    });
    TimelineMarks.drawNames(this);
    TimelineMarks.drawAxis(this);
    if (this.onDraw) this.onDraw();
  }

  // Pan and zoom for some frames; return the ms between them, and the ms that each took to draw.
  script(frames) {
    const between = [], drawing = [];
    return new Promise((done) => {
      let last = null, frame = 0;
      const next = (now) => {
        if (last !== null) between.push(now - last);
        last = now;
        if (frame === frames) return done({ between, drawing });
        // A cosine of time: from the whole step to a thousandth of it and back, while panning.
        const share = frame++ / frames, span = this.end * 10 ** (-1.5 * (1 - Math.cos(4 * Math.PI * share)));
        const from = share * (this.end - span);
        this.setWindow(from, from + span);
        const began = performance.now();
        this.draw();
        drawing.push(performance.now() - began);
        requestAnimationFrame(next);
      };
      requestAnimationFrame(next);
    });
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
              pictureOf(this, run, level, rank);
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
        const level = levels.get(run), picture = pictureOf(this, run, level, rank);
        const y = TimelinePicture.AXIS + top - this.top, high = level.group * this.row;
        if (y > this.height || y + level.rows * high < TimelinePicture.AXIS) continue;
        const left = this.from / level.width, wide = (this.to - this.from) / level.width;
        const used = Math.min(wide, level.bins - left);
        // The last row may be of fewer workers, so the rows are not drawn to their end.
        context.drawImage(picture, left, 0, used, this.schedule.perRank / level.group,
          TimelinePicture.GUTTER, y, this.plotWidth * used / wide, this.schedule.perRank * this.row);
      }
    });
  }
}

return TimelinePicture;
})();
