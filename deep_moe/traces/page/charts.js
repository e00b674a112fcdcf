// Above the lanes: the whole call with the part that is shown, a time axis, the phases, and how busy
// memory, L2, links and tensor cores were.

const OVERVIEW_HEIGHT = 22;
const AXIS_HEIGHT = 20;
const PHASE_HEIGHT = 15;
const CHART_HEIGHT = 34;
const FINE_PARTS = 8192;

class ChartView {
  constructor(canvas, data, view) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.data = data;
    this.view = view;
    this.charts = [...new Set(data.series.map((series) => series.name))];
    this.height =
      OVERVIEW_HEIGHT + AXIS_HEIGHT + PHASE_HEIGHT * data.phases.length + CHART_HEIGHT * this.charts.length + 4;
    this.marked = null; // [x, x] while a stretch is marked
    this.known = new Map();
  }

  // For each phase, which share of the SMs were at it, in each of `count` parts of a stretch. Long
  // stretches are added up from parts of the whole call, which are made once.
  shares(start, end, count) {
    const key = [start, end, count, this.view.rank].join();
    if (!this.known.has(key)) {
      if (this.known.size > 4) this.known.clear();
      const part = this.data.end / FINE_PARTS;
      this.known.set(
        key,
        (end - start) / count < part || count === FINE_PARTS
          ? this.countedShares(start, end, count)
          : this.shares(0, this.data.end, FINE_PARTS).map((fine) => rebinned(fine, start / part, end / part, count)),
      );
    }
    return this.known.get(key);
  }

  countedShares(start, end, count) {
    const { spans, lanes, steps, phases } = this.data;
    const sums = phases.map(() => new Float32Array(count));
    const scale = count / (end - start);
    const ctas = new Set();
    // A CTA is at a phase when its busiest role is: one role of each stands for it.
    const roles = phases.map(() => new Map());
    for (const lane of lanes) {
      if (this.view.rank >= 0 && lane.rank !== this.view.rank) continue;
      ctas.add(`${lane.rank} ${lane.cta}`);
      const role = lane.role.replace(/ \+\d+$/, "");
      const own = phases.map(() => null);
      for (let i = firstSpan(spans, lane, start); i < lane.end && spans.start[i] < end; ++i) {
        const { phaseIndex: phase, isShownAbove } = steps[spans.step[i]];
        if (!isShownAbove) continue;
        if (!own[phase]) {
          if (!roles[phase].has(role)) roles[phase].set(role, new Float32Array(count));
          own[phase] = roles[phase].get(role);
        }
        const sum = own[phase];
        const left = Math.max(0, (spans.start[i] - start) * scale);
        const right = Math.min(count, (spans.start[i] + spans.duration[i] - start) * scale);
        for (let x = left | 0; x < right; ++x) sum[x] += Math.min(right, x + 1) - Math.max(left, x);
      }
    }
    phases.forEach((_, phase) => {
      for (const sum of roles[phase].values()) {
        for (let x = 0; x < count; ++x) sums[phase][x] = Math.max(sums[phase][x], sum[x] / ctas.size);
      }
    });
    return sums;
  }

  // The mean over the chosen ranks, in each of `count` parts of a stretch.
  usage(name, start, end, count) {
    const chosen = this.data.series.filter(
      (series) => series.name === name && (this.view.rank < 0 || series.rank === this.view.rank),
    );
    const mean = new Float32Array(count);
    for (const series of chosen) {
      const [from, to] = [start, end].map((time) => (time - series.start) / series.step);
      rebinned(series.shares, from, to, count).forEach((share, x) => {
        mean[x] += share / chosen.length;
      });
    }
    return mean;
  }

  mostOf(name) {
    const series = this.data.series.find((one) => one.name === name);
    return series.unit === "GB/s" ? `${(series.most / 1000).toFixed(2)} TB/s` : `${series.most} ${series.unit}`;
  }

  draw(width) {
    const { canvas, context, view } = this;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(this.height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${this.height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.colours = Object.fromEntries(
      ["back", "text", "quiet", "line", "accent", "panel"].map((name) => [name, cssColour(`--${name}`)]),
    );
    context.fillStyle = this.colours.back;
    context.fillRect(0, 0, width, this.height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const plot = Math.max(1, Math.floor(width - view.gutter));
    this.drawOverview(plot);
    this.drawAxis(plot);
    let y = OVERVIEW_HEIGHT + AXIS_HEIGHT;
    const shares = this.shares(view.start, view.end, plot);
    this.data.phases.forEach((phase, i) => {
      this.label(phase, y + PHASE_HEIGHT / 2);
      this.band(shares[i], y, PHASE_HEIGHT - 2, PHASE_HUES[i]);
      y += PHASE_HEIGHT;
    });
    for (const name of this.charts) {
      this.label(name, y + 10);
      this.label(this.mostOf(name), y + 23, this.colours.quiet);
      this.area(this.usage(name, view.start, view.end, plot), y + 2, CHART_HEIGHT - 4);
      y += CHART_HEIGHT;
    }
    context.fillStyle = this.colours.line;
    context.fillRect(0, this.height - 1, width, 1);
    if (this.marked) {
      context.fillStyle = this.colours.accent + "44";
      const [from, to] = [Math.min(...this.marked), Math.max(...this.marked)];
      context.fillRect(from, OVERVIEW_HEIGHT, to - from, this.height);
    }
  }

  label(text, y, colour = this.colours.text) {
    this.context.fillStyle = colour;
    this.context.fillText(text, 6, y);
  }

  band(shares, y, height, hue) {
    const { context, view } = this;
    const full = css(fromHsl(hue, 0.62, 0.5));
    context.fillStyle = full;
    shares.forEach((share, x) => {
      if (share < 0.002) return;
      context.globalAlpha = 0.12 + 0.88 * Math.min(1, share);
      context.fillRect(view.gutter + x, y, 1, height);
    });
    context.globalAlpha = 1;
  }

  area(shares, y, height) {
    const { context, view } = this;
    context.fillStyle = this.colours.panel;
    context.fillRect(view.gutter, y, shares.length, height);
    context.beginPath();
    context.moveTo(view.gutter, y + height);
    shares.forEach((share, x) => context.lineTo(view.gutter + x + 0.5, y + height * (1 - Math.min(1, share))));
    context.lineTo(view.gutter + shares.length, y + height);
    context.fillStyle = this.colours.accent;
    context.globalAlpha = 0.65;
    context.fill();
    context.globalAlpha = 1;
  }

  drawOverview(plot) {
    const { context, view, data } = this;
    const height = OVERVIEW_HEIGHT - 6;
    const shares = this.shares(0, data.end, plot);
    for (let x = 0; x < plot; ++x) {
      let y = 2 + height;
      let sum = 0;
      for (const one of shares) sum += one[x];
      shares.forEach((one, i) => {
        const part = (height * one[x]) / Math.max(1, sum);
        if (part < 0.1) return;
        context.fillStyle = css(fromHsl(PHASE_HUES[i], 0.5, 0.5));
        context.fillRect(view.gutter + x, y - part, 1, part);
        y -= part;
      });
    }
    this.label("whole call", OVERVIEW_HEIGHT / 2, this.colours.quiet);
    const [left, right] = [view.start, view.end].map((time) => view.gutter + (time / data.end) * plot);
    context.fillStyle = this.colours.back;
    context.globalAlpha = 0.6;
    context.fillRect(view.gutter, 1, left - view.gutter, height + 2);
    context.fillRect(right, 1, view.gutter + plot - right, height + 2);
    context.globalAlpha = 1;
    context.strokeStyle = this.colours.accent;
    context.strokeRect(left + 0.5, 1.5, Math.max(2, right - left - 1), height + 1);
  }

  drawAxis(plot) {
    const { context, view, data } = this;
    const step = niceStep(((view.end - view.start) / plot) * 90);
    const y = OVERVIEW_HEIGHT + AXIS_HEIGHT / 2;
    this.label(data.unit === "us" ? "time" : data.unit, y, this.colours.quiet);
    const digits = Math.max(0, -Math.floor(Math.log10(step / 1000)));
    for (let time = Math.ceil(view.start / step) * step; time <= view.end; time += step) {
      const x = Math.round(view.xOf(time)) + 0.5;
      context.fillStyle = this.colours.line;
      context.fillRect(x - 0.5, OVERVIEW_HEIGHT, 1, this.height);
      context.fillStyle = this.colours.quiet;
      context.fillText(`${(time / 1000).toFixed(digits)}${data.unit === "us" ? " µs" : ""}`, x + 4, y);
    }
  }

  // What the pointer is at, in words; "" for nothing.
  wordsAt(x, y) {
    const { view, data } = this;
    if (x < view.gutter) return "";
    const time = view.timeAt(x);
    const at = words(time, data.unit);
    const width = Math.max(1, (view.end - view.start) / 800);
    let row = Math.floor((y - OVERVIEW_HEIGHT - AXIS_HEIGHT) / PHASE_HEIGHT);
    if (y < OVERVIEW_HEIGHT) return "drag to move the part that is shown";
    if (row < 0) return at;
    if (row < data.phases.length) {
      const [share] = this.shares(time, time + width, 1)[row];
      return `${data.phases[row]}: ${(100 * Math.min(1, share)).toFixed(0)} % of the ${data.place}s\n${at}`;
    }
    row = Math.floor((y - OVERVIEW_HEIGHT - AXIS_HEIGHT - PHASE_HEIGHT * data.phases.length) / CHART_HEIGHT);
    const name = this.charts[row];
    if (!name) return at;
    const [share] = this.usage(name, time - width, time + width, 1);
    return `${name}: ${(100 * share).toFixed(0)} % of ${this.mostOf(name)}\n${at}`;
  }
}

// Means of `count` equal parts of a stretch of bins, which may begin and end within a bin.
function rebinned(bins, start, end, count) {
  const width = (end - start) / count;
  return Float32Array.from({ length: count }, (_, x) => {
    const [from, to] = [start + x * width, start + (x + 1) * width];
    const last = Math.min(bins.length - 1, Math.ceil(to) - 1);
    let sum = 0;
    for (let i = Math.max(0, Math.floor(from)); i <= last; ++i) {
      sum += bins[i] * (Math.min(to, i + 1) - Math.max(from, i));
    }
    return sum / width;
  });
}

// 1, 2 or 5 times a power of ten, at least as long.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}
