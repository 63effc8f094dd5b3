// The strip over the timeline: the busy workers of the whole step, and the part that is visible.

const ScheduleOverview = (() => {
  "use strict";

  // Draw the overview after each frame: its areas are drawn once, and the visible time each time.
  function draw(view) {
    const { overview, picture } = view, ratio = picture.ratio, context = overview.getContext("2d");
    const wide = overview.clientWidth, high = overview.clientHeight, left = TimelinePicture.GUTTER;
    if (!view.overviewPicture || overview.width !== Math.round(wide * ratio)) {
      overview.width = Math.round(wide * ratio);
      overview.height = Math.round(high * ratio);
      view.overviewPicture = areas(view, wide - left, high);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.drawImage(view.overviewPicture, left, 0, wide - left, high);
    const x = left + picture.from / picture.end * (wide - left), end = left + picture.to / picture.end * (wide - left);
    context.strokeStyle = picture.colours.accent;
    context.lineWidth = 2;
    context.strokeRect(x + 1, 1, Math.max(end - x - 2, 2), high - 2);
    context.fillStyle = picture.colours.quiet;
    context.font = "11px system-ui, sans-serif";
    context.fillText("busy workers", 6, high / 2 + 4);
  }

  // Draw the busy workers by kind over time: the cells of all rows of the coarsest level.
  function areas(view, wide, high) {
    const { picture, schedule } = view, { json, predicted: run } = schedule, kinds = json.kinds.length;
    const level = ScheduleSums.fill(schedule, run, run.levels.findLast((one) => one.bins <= 1100) || run.levels[0]);
    const sums = new Float64Array(level.bins * kinds), cells = level.cells;
    for (let at = 0; at < cells.length; at++) sums[at % sums.length] += cells[at];
    const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
    canvas.width = level.bins;
    canvas.height = high;
    const whole = level.width * json.workers;
    for (let bin = 0; bin < level.bins; bin++)
      for (let kind = 0, y = high; kind < kinds; kind++) {
        const part = sums[bin * kinds + kind] / whole * high;
        if (!part) continue;
        context.fillStyle = json.kinds[kind].colour;
        context.fillRect(bin, y - part, 1, part);
        y -= part;
      }
    const stretched = document.createElement("canvas");
    stretched.width = Math.round(wide * picture.ratio);
    stretched.height = Math.round(high * picture.ratio);
    const share = run.end / picture.end * level.bins * level.width / run.end;
    stretched.getContext("2d").drawImage(canvas, 0, 0, level.bins, high, 0, 0, stretched.width * share, stretched.height);
    return stretched;
  }

  return { draw };
})();
