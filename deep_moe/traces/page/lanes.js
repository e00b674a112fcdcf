// The lanes: a row for each warp that recorded, drawn pixel by pixel. A pixel's colour is the mean of
// what its lane did meanwhile, so that a picture of any number of blocks takes as long as its pixels
// and the blocks in view.

const LANE_HEIGHTS = [1, 2, 3, 5, 7, 9, 11, 14, 18, 24];

class LaneView {
  constructor(canvas, data, palette, view) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.data = data;
    this.palette = palette;
    this.view = view;
    this.rows = [];
    this.mask = null; // 1 for each span that was asked for
  }

  // Which lanes are shown, in which order, and where. A group is an SM, or a role of a rank.
  arrange() {
    const { view, data } = this;
    const wanted = laneFilter(view.laneFilter);
    const shown = data.lanes.filter(
      (lane) => (view.rank < 0 || lane.rank === view.rank) && wanted(lane),
    );
    const byRole = view.grouping === "role";
    if (byRole) {
      shown.sort((a, b) => a.rank - b.rank || a.roleIndex - b.roleIndex || a.cta - b.cta);
    }
    const height = LANE_HEIGHTS[view.laneHeight];
    const gap = height >= 5 ? 5 : height >= 2 ? 1 : 0;
    let y = 0;
    let before = null;
    this.rows = shown.map((lane) => {
      const group = byRole ? `${lane.rank} ${lane.role}` : `${lane.rank} ${lane.cta}`;
      const begins = group !== before;
      if (begins && before !== null) y += gap;
      before = group;
      const row = { lane, y, begins };
      y += height;
      return row;
    });
    this.rowHeight = height;
    this.totalHeight = y + 8;
    return this.totalHeight;
  }

  // Index of the row at a height, as seen from the top of all rows; -1 if there is none.
  rowAt(y) {
    let [low, high] = [0, this.rows.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].y + this.rowHeight > y) high = middle;
      else low = middle + 1;
    }
    return low < this.rows.length && this.rows[low].y <= y ? low : -1;
  }

  // The span under a point of the canvas, in CSS pixels; -1 if there is none.
  spanAt(x, y) {
    const row = this.rows[this.rowAt(y + this.view.scroll)];
    if (!row || x < this.view.gutter) return -1;
    const { spans } = this.data;
    const time = this.view.timeAt(x);
    const i = firstSpan(spans, row.lane, time);
    return i < row.lane.end && spans.start[i] <= time ? i : -1;
  }

  draw(width, height) {
    const { view, context, canvas } = this;
    const ratio = devicePixelRatio || 1;
    const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== across || canvas.height !== down) {
      [canvas.width, canvas.height] = [across, down];
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const gutter = Math.round(view.gutter * ratio);
    const plot = across - gutter;
    if (plot <= 0 || down <= 0) return;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = cssColour("--back");
    context.fillRect(0, 0, across, down);
    const image = context.createImageData(plot, down);
    const pixels = new Uint32Array(image.data.buffer);
    const [red, green, blue] = this.palette.back;
    pixels.fill(packed(red, green, blue));
    const painter = new RowPainter(plot, this.palette, this.data, this.mask);
    const first = Math.max(0, this.rowAbove(view.scroll));
    const visible = [];
    for (let i = first; i < this.rows.length; ++i) {
      const row = this.rows[i];
      const top = row.y - view.scroll;
      if (top >= height) break;
      visible.push([row, top]);
      painter.paint(row.lane, view.start, view.end);
      this.copyRow(pixels, plot, down, painter, Math.round(top * ratio), Math.round((top + this.rowHeight) * ratio));
    }
    context.putImageData(image, gutter, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    for (const [row, top] of visible) {
      if (this.rowHeight >= 11) this.labelSpans(row.lane, top, width);
    }
    this.labelRows(visible, width);
    this.markChosen(visible, width);
  }

  rowAbove(y) {
    let [low, high] = [0, this.rows.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].y + this.rowHeight > y) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Work as high as the lane, waits as a thin line in its middle.
  copyRow(pixels, plot, down, painter, top, bottom) {
    const height = bottom - top;
    const line = height >= 5 ? Math.max(2, Math.round(height / 4)) : height;
    const lineTop = top + ((height - line) >> 1);
    const end = Math.min(down, height >= 5 ? bottom - 1 : bottom);
    for (let y = Math.max(0, top); y < end; ++y) {
      pixels.set(y >= lineTop && y < lineTop + line ? painter.all : painter.work, y * plot);
    }
  }

  labelSpans(lane, top, width) {
    const { view, context, data } = this;
    const { spans } = data;
    context.font = `${Math.min(11, this.rowHeight - 2)}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    const scale = view.scale;
    for (let i = firstSpan(spans, lane, view.start); i < lane.end && spans.start[i] < view.end; ++i) {
      const size = spans.duration[i] * scale;
      if (size < 34 || this.palette.isWait[spans.step[i]]) continue;
      const left = Math.max(view.gutter, view.xOf(spans.start[i])) + 3;
      const room = Math.min(width, view.xOf(spans.start[i] + spans.duration[i])) - left - 3;
      const text = this.label(i).find((words) => context.measureText(words).width <= room);
      if (!text) continue;
      const [red, green, blue] = this.palette.colour(spans.step[i], spans.expert[i]);
      context.fillStyle = 0.3 * red + 0.59 * green + 0.11 * blue > 140 ? "#000" : "#fff";
      context.fillText(text, left, top + this.rowHeight / 2);
    }
  }

  // From long to short.
  label(i) {
    const { spans, steps } = this.data;
    const name = steps[spans.step[i]].name;
    if (spans.expert[i] < 0) return [name];
    const block = `e${spans.expert[i]} m${spans.m_block[i]} n${spans.n_block[i]}`;
    return [`${name} · ${block}`, block, `e${spans.expert[i]}`];
  }

  labelRows(visible, width) {
    const { view, context } = this;
    context.fillStyle = cssColour("--back");
    context.fillRect(0, 0, view.gutter - 1, 1e5);
    context.textBaseline = "middle";
    const [text, quiet, line] = ["--text", "--quiet", "--line"].map(cssColour);
    const byRole = view.grouping === "role";
    const size = Math.min(11, Math.max(9, this.rowHeight - 1));
    let [free, freeRight] = [-1, 6];
    visible.forEach(([row, top], i) => {
      const { lane } = row;
      const opens = row.begins || i === 0;
      if (opens && this.rowHeight >= 5) {
        context.fillStyle = line;
        context.fillRect(0, top - 3, width, 1);
      }
      const middle = top + this.rowHeight / 2;
      context.font = `${size}px system-ui, sans-serif`;
      const labelled = Math.max(middle, 6);
      if (opens && labelled >= free) {
        context.fillStyle = text;
        const rank = this.data.ranks.length > 1 ? `r${lane.rank} ` : "";
        context.fillText(byRole ? rank + lane.role : `${rank}${this.data.place} ${lane.cta}`, 6, labelled);
        free = labelled + 11;
      }
      if (this.rowHeight >= 9 || (byRole && middle >= freeRight)) {
        freeRight = middle + 11;
        context.fillStyle = quiet;
        const own = byRole ? `${this.data.place} ${lane.cta}` : lane.role;
        context.textAlign = "right";
        context.fillText(own, view.gutter - 6, middle);
        context.textAlign = "left";
      }
    });
  }

  // Frames around the kept and the pointed-at span, and an arrow from what a wait waited for.
  markChosen(visible, width) {
    const { view, context, data } = this;
    const { spans } = data;
    context.save();
    context.beginPath();
    context.rect(view.gutter, 0, width - view.gutter, 1e5);
    context.clip();
    const tops = new Map(visible.map(([row, top]) => [row.lane, top]));
    const frame = (i) => {
      const top = tops.get(data.lanes[spans.lane[i]]);
      const left = view.xOf(spans.start[i]);
      if (top !== undefined) context.strokeRect(left, top, Math.max(2, spans.duration[i] * view.scale), this.rowHeight - 1);
      return [top, left];
    };
    for (const [i, weight] of [[view.kept, 2], [view.pointed, 1.2]]) {
      if (i < 0) continue;
      context.strokeStyle = cssColour("--accent");
      context.lineWidth = weight;
      const [top] = frame(i);
      const other = spans.awaited[i] ? i + spans.awaited[i] : -1;
      if (other < 0) continue;
      const [otherTop] = frame(other);
      const edge = view.rowTop(this, i, top);
      const otherEdge = view.rowTop(this, other, otherTop);
      if (edge === null || otherEdge === null) continue;
      this.arrow(view.xOf(awaitedMoment(data, i)), otherEdge + this.rowHeight / 2, edge + this.rowHeight / 2);
    }
    context.restore();
  }

  arrow(x, from, to) {
    const { context } = this;
    const tip = to > from ? -6 : 6;
    context.beginPath();
    context.moveTo(x, from);
    context.lineTo(x, to);
    context.moveTo(x - 4, to + tip);
    context.lineTo(x, to);
    context.lineTo(x + 4, to + tip);
    context.stroke();
  }
}

// The moment at which what a span waited for was there: the other's beginning, or its end.
function awaitedMoment(data, i) {
  const { spans } = data;
  const other = i + spans.awaited[i];
  const begin = spans.start[other];
  const end = begin + spans.duration[other];
  const own = spans.start[i] + spans.duration[i];
  return Math.abs(end - own) < Math.abs(begin - own) ? end : begin;
}

function packed(red, green, blue) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// One row of pixels: in `work` what a lane computed and moved, in `all` also its waits.
class RowPainter {
  constructor(width, palette, data, mask) {
    this.width = width;
    this.palette = palette;
    this.data = data;
    this.mask = mask;
    this.sums = [0, 1].map(() => [0, 1, 2, 3].map(() => new Float32Array(width)));
    this.work = new Uint32Array(width);
    this.all = new Uint32Array(width);
  }

  paint(lane, start, end) {
    const { spans } = this.data;
    const { entry, isWait, red, green, blue, back } = this.palette;
    const { width, mask } = this;
    const scale = width / (end - start);
    for (const kind of this.sums) for (const sum of kind) sum.fill(0);
    for (let i = firstSpan(spans, lane, start); i < lane.end && spans.start[i] < end; ++i) {
      const left = Math.max(0, (spans.start[i] - start) * scale);
      const right = Math.min(width, (spans.start[i] + spans.duration[i] - start) * scale);
      const first = left | 0;
      const last = Math.min(right | 0, width - 1);
      const at = entry[i];
      const weight = mask && !mask[i] ? 0.16 : 1; // what nobody asked for is pale
      const [sumRed, sumGreen, sumBlue, cover] = this.sums[isWait[spans.step[i]]];
      for (let x = first; x <= last; ++x) {
        const share = Math.min(right, x + 1) - Math.max(left, x);
        // A line between blocks that are wide enough to be told apart.
        const edge = x === first && right - left > 6 ? 0.55 : 1;
        const part = share * weight * edge;
        sumRed[x] += part * red[at];
        sumGreen[x] += part * green[at];
        sumBlue[x] += part * blue[at];
        cover[x] += part;
      }
    }
    const [done, waited] = this.sums;
    for (let x = 0; x < width; ++x) {
      const free = Math.max(0, 1 - done[3][x]);
      this.work[x] = packed(done[0][x] + free * back[0], done[1][x] + free * back[1], done[2][x] + free * back[2]);
      const rest = Math.max(0, free - waited[3][x]);
      this.all[x] = packed(
        done[0][x] + waited[0][x] + rest * back[0],
        done[1][x] + waited[1][x] + rest * back[1],
        done[2][x] + waited[2][x] + rest * back[2],
      );
    }
  }
}

// ---- what is asked for

// "sm 3", "sm 0-3, math", "rank 1 epilogue": commas separate alternatives, each with words that a lane
// must all have.
function laneFilter(text) {
  const alternatives = text.toLowerCase().split(",").map((part) => part.trim()).filter(Boolean);
  if (!alternatives.length) return () => true;
  const tests = alternatives.map((part) => {
    const ranges = [];
    const rest = part.replace(/\b(sm|cta|rank)\s*(\d+)(?:\s*-\s*(\d+))?/g, (_, kind, low, high) => {
      ranges.push([kind === "rank" ? "rank" : "cta", Number(low), Number(high ?? low)]);
      return " ";
    });
    const wordsOf = rest.split(/\s+/).filter(Boolean);
    return (lane) =>
      ranges.every(([field, low, high]) => lane[field] >= low && lane[field] <= high) &&
      wordsOf.every((word) => lane.role.toLowerCase().includes(word));
  });
  return (lane) => tests.some((test) => test(lane));
}

// "expert 5 Linear2", "m-block 12", "wait": a mask of the spans that have all of it; null for nothing.
function spanFilter(text, data) {
  const numbers = [];
  const rest = text.toLowerCase().replace(/\b(expert|e|m-block|m|n-block|n)\s*(\d+)\b/g, (_, kind, value) => {
    const field = kind[0] === "e" ? "expert" : kind[0] === "m" ? "m_block" : "n_block";
    numbers.push([data.spans[field], Number(value)]);
    return " ";
  });
  const wanted = rest.split(/\s+/).filter(Boolean);
  if (!numbers.length && !wanted.length) return null;
  const isStep = data.steps.map((step) => wanted.every((word) => step.name.toLowerCase().includes(word)));
  const { count, step } = data.spans;
  const mask = new Uint8Array(count);
  for (let i = 0; i < count; ++i) {
    mask[i] = isStep[step[i]] && numbers.every(([column, value]) => column[i] === value) ? 1 : 0;
  }
  return mask;
}
