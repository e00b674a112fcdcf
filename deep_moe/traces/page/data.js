// The data of the page: spans in columns, sorted by lane and start; times in nanoseconds.

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Columns one behind the other, as traces/page.py writes them.
class ColumnReader {
  constructor(bytes) {
    this.bytes = bytes;
    this.offset = 0;
  }

  read(count) {
    const bytes = this.bytes;
    const [b0, b1, b2, b3] = [0, 1, 2, 3].map((plane) => this.offset + plane * count);
    const column = new Int32Array(count);
    let value = 0;
    for (let i = 0; i < count; ++i) {
      value += bytes[b0 + i] | (bytes[b1 + i] << 8) | (bytes[b2 + i] << 16) | (bytes[b3 + i] << 24);
      column[i] = value;
    }
    this.offset += 4 * count;
    return column;
  }
}

async function loadData() {
  const header = JSON.parse(document.getElementById("header").textContent);
  const reader = new ColumnReader(await inflate(document.getElementById("columns").textContent));
  const data = { ...header, spans: { count: header.num_spans } };
  for (const field of header.fields) data.spans[field] = reader.read(header.num_spans);
  const spans = data.spans;
  let first = 0;
  data.lanes = header.lanes.map(([rank, cta, role, count]) => {
    const lane = { rank, cta, role: header.roles[role], roleIndex: role, first, end: first + count };
    first += count;
    return lane;
  });
  spans.lane = new Int32Array(spans.count);
  data.lanes.forEach((lane, i) => spans.lane.fill(i, lane.first, lane.end));
  data.series.forEach((series) => {
    series.shares = Float32Array.from(reader.read(series.count), (share) => share / header.share_steps);
  });
  data.steps.forEach((step) => {
    step.phaseIndex = header.phases.indexOf(step.phase);
    // Loads run ahead of the products, so that they say little of where a call is.
    step.isShownAbove = step.phaseIndex >= 0 && !step.name.startsWith("load");
  });
  data.ranks = [...new Set(data.lanes.map((lane) => lane.rank))];
  data.end = 0;
  for (let i = 0; i < spans.count; ++i) data.end = Math.max(data.end, spans.start[i] + spans.duration[i]);
  data.experts = [...new Set(spans.expert)].filter((expert) => expert >= 0).sort((a, b) => a - b);
  return data;
}

// Index of the first span of a lane that ends behind a time.
function firstSpan(spans, lane, time) {
  let [low, high] = [lane.first, lane.end];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans.start[middle] + spans.duration[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// A duration with three digits, in the unit of the trace: microseconds, or thousands of instructions.
function words(ns, unit) {
  const value = ns / 1000;
  const digits = Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 2 : 3;
  return `${value.toFixed(digits)} ${unit === "us" ? "µs" : unit}`;
}

function laneName(data, lane) {
  return [`rank ${lane.rank}`, `${data.place} ${lane.cta}`, lane.role].filter(Boolean).join(" · ");
}
