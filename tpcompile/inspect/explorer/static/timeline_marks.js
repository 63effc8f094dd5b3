// What is drawn over and beside the rectangles of the timeline: labels, outlines, names and the axis.

const TimelineMarks = (() => {
  "use strict";

  function drawLabels(picture) {
    const { context } = picture;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = "#1a1a1a";
    context.textBaseline = "middle";
    const letter = context.measureText("norm_gate_up_swiglu rows=0:96").width / 29;
    eachVisible(picture, (run, number, x, right, y) => {
      if (right - x < 46) return;
      const left = Math.max(x, TimelinePicture.GUTTER) + 4, room = right - left - 3;
      const whole = room > 150 ? ScheduleData.label(picture.schedule, number)
        : picture.schedule.json.kinds[picture.schedule.kind[number]].name;
      const most = Math.floor(room / letter);
      if (most < 5) return;
      context.fillText(whole.length > most ? `${whole.slice(0, most - 1)}…` : whole, left, y + picture.row / 2);
    });
  }

  // Call back for each visible instruction, if rows are high enough to have names.
  function eachVisible(picture, draw) {
    for (const { run, rank, top } of picture.bands) {
      const y = TimelinePicture.AXIS + top - picture.top, { perRank } = picture.schedule;
      const first = Math.max(0, Math.floor((TimelinePicture.AXIS - y) / picture.row));
      const last = Math.min(perRank - 1, Math.floor((picture.height - y) / picture.row));
      for (let place = first; place <= last; place++) {
        const worker = rank * perRank + place;
        for (let at = TimelinePixels.firstAfter(run, worker, picture.from); at < run.rowAt[worker + 1]; at++) {
          const number = run.rows[at];
          if (run.start[number] >= picture.to) break;
          draw(run, number, picture.xOf(run.start[number]), picture.xOf(run.finish[number]), y + place * picture.row);
        }
      }
    }
  }

  // Outline the critical path and connect its instructions.
  function drawChain(picture) {
    const { context } = picture, run = picture.schedule.predicted, place = picture.runs.indexOf(run);
    context.strokeStyle = picture.colours.ink;
    context.lineWidth = 1.5;
    const path = new Path2D();
    let before = null;
    for (const number of picture.schedule.columns.chain) {
      const y = TimelinePicture.AXIS + picture.rowTop(place, run.worker[number]) - picture.top;
      const x = picture.xOf(run.start[number]), right = picture.xOf(run.finish[number]);
      const visible = right >= TimelinePicture.GUTTER && x <= picture.width;
      if (visible && before) { path.moveTo(before.right, before.y + picture.row / 2); path.lineTo(x, y + picture.row / 2); }
      if (visible) path.rect(x, y, Math.max(right - x, 1), Math.max(picture.row - 1, 1));
      before = { right, y };
    }
    context.stroke(path);
  }

  function drawMarks(picture) {
    const { context } = picture;
    for (const [number, colour, width] of [[picture.hovered, picture.colours.ink, 1.5], [picture.selected, picture.colours.accent, 3]])
      if (number >= 0)
        picture.runs.forEach((run, place) => {
          const y = TimelinePicture.AXIS + picture.rowTop(place, run.worker[number]) - picture.top;
          const x = picture.xOf(run.start[number]), right = picture.xOf(run.finish[number]);
          context.strokeStyle = colour;
          context.lineWidth = width;
          context.strokeRect(x - 1, y - 1, Math.max(right - x, 2) + 2, Math.max(picture.row, 3) + 1);
          const early = run === picture.schedule.predicted ? picture.schedule.columns.released_by[number] : -1;
          if (early < 0 || number !== picture.selected) return;
          const above = TimelinePicture.AXIS + picture.rowTop(place, run.worker[early]) - picture.top;
          context.beginPath();
          context.moveTo(picture.xOf(run.finish[early]), above + picture.row / 2);
          context.lineTo(x, y + picture.row / 2);
          context.stroke();
          context.strokeRect(picture.xOf(run.start[early]), above, Math.max(picture.xOf(run.finish[early]) - picture.xOf(run.start[early]), 2), Math.max(picture.row, 2));
        });
  }

  // Return the layers whose names have room, each with its place.
  function namedLayers(picture) {
    const found = [];
    let free = -Infinity;
    for (const { layer, start } of picture.layers) {
      const x = picture.xOf(start);
      if (x < TimelinePicture.GUTTER - 1 || x < free || x > picture.width - 40) continue;
      found.push({ layer, x });
      free = x + 54;
    }
    return found;
  }

  function drawLayers(picture) {
    const { context } = picture;
    context.strokeStyle = picture.colours.quiet;
    context.lineWidth = 0.5;
    context.beginPath();
    for (const { x } of namedLayers(picture)) {
      context.moveTo(Math.round(x) + 0.5, TimelinePicture.AXIS);
      context.lineTo(Math.round(x) + 0.5, picture.height);
    }
    context.stroke();
  }

  function drawNames(picture) {
    const { context } = picture;
    context.fillStyle = picture.colours.paper;
    context.fillRect(0, TimelinePicture.AXIS, TimelinePicture.GUTTER - 1, picture.plotHeight);
    context.save();
    context.beginPath();
    context.rect(0, TimelinePicture.AXIS, picture.width, picture.plotHeight);
    context.clip();
    context.textBaseline = "middle";
    for (const { run, rank, head, top } of picture.bands) {
      const y = TimelinePicture.AXIS + head - picture.top;
      if (y > picture.height || y + picture.head + picture.schedule.perRank * picture.row < TimelinePicture.AXIS) continue;
      if (picture.head) {
        context.font = "bold 12px system-ui, sans-serif";
        context.fillStyle = picture.colours.ink;
        const name = picture.runs.length > 1 ? `rank ${rank}, ${run.name}` : `rank ${rank}`;
        context.fillText(name, 6, y + picture.head / 2 + 1);
      }
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = picture.colours.quiet;
      const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((step) => step * picture.row >= 13) || 1024;
      for (let worker = 0; worker < picture.schedule.perRank; worker += every) {
        const middle = TimelinePicture.AXIS + top - picture.top + (worker + 0.5) * picture.row;
        const inside = middle + 6 <= TimelinePicture.AXIS + top - picture.top + picture.schedule.perRank * picture.row + 8;
        if (inside && middle > TimelinePicture.AXIS && middle < picture.height)
          context.fillText(`worker ${worker}`, 14, Math.max(middle, TimelinePicture.AXIS + top - picture.top + 6));
      }
    }
    context.restore();
  }

  function drawAxis(picture) {
    const { context } = picture;
    context.fillStyle = picture.colours.panel;
    context.fillRect(0, 0, picture.width, TimelinePicture.AXIS - 1);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = picture.colours.quiet;
    const step = niceStep((picture.to - picture.from) / Math.max(2, picture.plotWidth / 110));
    const digits = Math.max(0, Math.min(3, Math.ceil(-Math.log10(step / 1000))));
    for (let moment = Math.ceil(picture.from / step) * step; moment <= picture.to; moment += step) {
      const text = `${(moment / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} µs`;
      const x = picture.xOf(moment);
      context.fillRect(Math.round(x), 12, 1, 5);
      context.fillText(text, Math.min(x + 3, picture.width - 7 * text.length), 8);
    }
    for (const { layer, x } of namedLayers(picture)) context.fillText(`layer ${layer}`, x + 3, 25);
  }

  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least));
  }

  return { drawLabels, drawChain, drawMarks, drawLayers, drawNames, drawAxis };
})();
