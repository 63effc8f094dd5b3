// The rectangles of the timeline as pixels: one row per worker, one rectangle per instruction.
//
// Rectangles are written into an array of pixels, row by row, which is much faster than one call per
// rectangle. If rows or instructions are narrower than a pixel, pixels have the mean colour of what
// they show; if too many instructions are visible, it comes from the cells of a level of detail.

const TimelinePixels = (() => {
  "use strict";

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

  // Return the picture of one rank of a level, one pixel per cell.
  function pictureOf(picture, run, level, rank) {
    level.pictures ||= [];
    if (level.pictures[rank]) return level.pictures[rank];
    const { cells, rows, bins, width, group } = ScheduleSums.fill(picture.schedule, run, level);
    const image = new ImageData(bins, rows), pixels = new Uint32Array(image.data.buffer);
    const kinds = picture.kinds.length, colours = picture.flat, [red, green, blue] = picture.paper;
    for (let row = 0, at = rank * rows * bins * kinds; row < rows; row++) {
      const workers = Math.min(group, picture.schedule.perRank - row * group);
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

  function drawBand(picture, { run, rank, top }) {
    const high = picture.image.height, { perRank } = picture.schedule, row = picture.row * picture.ratio;
    const origin = (top - picture.top) * picture.ratio;
    const first = Math.max(0, Math.floor(-origin / row));
    const last = Math.min(perRank - 1, Math.floor((high - 1 - origin) / row));
    let pending = [], line = -1;
    for (let place = first; place <= last; place++) {
      const y = Math.floor(origin + place * row);
      if (row >= 2) { drawRow(picture, run, [rank * perRank + place], y, Math.floor(origin + (place + 1) * row)); continue; }
      if (y !== line && pending.length) { drawRow(picture, run, pending, line, line + 1); pending = []; }
      line = y;
      pending.push(rank * perRank + place);
    }
    if (pending.length) drawRow(picture, run, pending, line, line + 1);
  }

  // Draw workers in one row of pixels, or one worker in several.
  function drawRow(picture, run, workers, top, bottom) {
    const wide = picture.image.width, high = picture.image.height;
    const scale = wide / (picture.to - picture.from), from = picture.from;
    const gap = bottom - top >= 5 ? 1 : 0;
    const y0 = Math.max(0, top), y1 = Math.min(high, bottom - gap);
    if (y0 >= y1) return;
    let dense = workers.length > 1;
    const worker = workers[0], begin = firstAfter(run, worker, from), end = run.rowAt[worker + 1];
    if (!dense) {
      const visible = firstAfter(run, worker, picture.to) - begin + 1;
      dense = visible * 3 > wide;
    }
    if (dense) return drawMeans(picture, run, workers, y0, y1, scale);
    const first = y0 * wide;
    for (let at = begin; at < end; at++) {
      if (run.starts[at] >= picture.to) break;
      const left = Math.max(0, Math.floor((run.starts[at] - from) * scale));
      let right = Math.min(wide, Math.floor((run.finishes[at] - from) * scale));
      if (right - left > 4) right -= 1;
      if (right <= left) right = Math.min(wide, left + 1);
      picture.pixels.fill(picture.packed[run.kinds[at]], first + left, first + right);
    }
    for (let y = y0 + 1; y < y1; y++) picture.pixels.copyWithin(y * wide, first, first + wide);
  }

  // Write the mean colours of some workers. `sums` hold the changes of the mean from pixel to pixel,
  // so that the work does not depend on the widths of instructions.
  function drawMeans(picture, run, workers, y0, y1, scale) {
    const wide = picture.image.width, { sums, flat } = picture;
    const { starts, finishes, kinds } = run, { from, to } = picture;
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
    const count = workers.length, [red, green, blue] = picture.paper;
    let r = 0, g = 0, b = 0, busy = 0;
    for (let x = 0, at = y0 * wide; x < wide; x++, at++) {
      r += sums[4 * x];
      g += sums[4 * x + 1];
      b += sums[4 * x + 2];
      busy += sums[4 * x + 3];
      const rest = Math.max(0, count - busy);
      picture.pixels[at] = 0xff000000 | Math.min(255, (b + rest * blue) / count) << 16
        | Math.min(255, (g + rest * green) / count) << 8 | Math.min(255, (r + rest * red) / count);
    }
    for (let y = y0 + 1; y < y1; y++) picture.pixels.copyWithin(y * wide, y0 * wide, (y0 + 1) * wide);
  }

  return { firstAfter, rgbOf, packed, pictureOf, drawBand };
})();
