// Puts the parts together: the view, and what mouse and keys do to it.

class View {
  constructor(data) {
    this.data = data;
    Object.assign(this, { start: 0, end: data.end, scroll: 0, width: 1, gutter: 150 });
    const colouring = data.experts.length ? "expert" : "step";
    Object.assign(this, { grouping: "sm", colouring, rank: -1, laneFilter: "", find: "" });
    Object.assign(this, { laneHeight: 6, pointed: -1, kept: -1 });
  }

  get scale() {
    return (this.width - this.gutter) / (this.end - this.start);
  }

  xOf(time) {
    return this.gutter + (time - this.start) * this.scale;
  }

  timeAt(x) {
    return this.start + (x - this.gutter) / this.scale;
  }

  show(start, end) {
    const length = Math.min(this.data.end, Math.max(20, end - start));
    this.start = Math.min(Math.max(0, start), this.data.end - length);
    this.end = this.start + length;
  }

  zoom(factor, x = (this.width + this.gutter) / 2) {
    const time = this.timeAt(Math.max(x, this.gutter));
    this.show(time - (time - this.start) * factor, time + (this.end - time) * factor);
  }

  move(share) {
    const by = (this.end - this.start) * share;
    this.show(this.start + by, this.end + by);
  }

  // Where a span's row is, above or below the visible ones if need be; null if it is filtered out.
  rowTop(lanes, i, visibleTop) {
    if (visibleTop !== undefined) return visibleTop;
    const row = lanes.rows.find((one) => one.lane === this.data.lanes[this.data.spans.lane[i]]);
    return row ? row.y - this.scroll : null;
  }
}

async function main() {
  const data = await loadData();
  const view = new View(data);
  const palette = new Palette(data);
  const byId = (id) => document.getElementById(id);
  const lanes = new LaneView(byId("lanes"), data, palette, view);
  const charts = new ChartView(byId("charts"), data, view);
  const scroller = byId("scroller");
  const page = { data, view, lanes, charts, frameMs: 0, numFrames: 0 };
  let isAsked = false;

  function draw() {
    isAsked = false;
    const begin = performance.now();
    view.width = scroller.clientWidth;
    view.scroll = scroller.scrollTop;
    charts.draw(view.width);
    lanes.draw(view.width, scroller.clientHeight);
    page.frameMs = performance.now() - begin;
    ++page.numFrames;
  }

  function ask() {
    if (!isAsked) requestAnimationFrame(draw);
    isAsked = true;
  }

  function arrange() {
    byId("height").style.height = `${lanes.arrange()}px`;
    ask();
  }

  function recolour() {
    palette.update(view.colouring);
    showLegend(data, palette, view, find);
    ask();
  }

  function keep(i) {
    view.kept = i;
    showDetails(data, i, goTo);
    ask();
  }

  // Shows a span, at least a thousandth of the picture wide, in the middle.
  function goTo(i) {
    const { start, duration, lane } = data.spans;
    let row = lanes.rows.find((one) => one.lane === data.lanes[lane[i]]);
    if (!row) {
      setFilters("", -1);
      row = lanes.rows.find((one) => one.lane === data.lanes[lane[i]]);
    }
    const middle = start[i] + duration[i] / 2;
    const length = Math.min(view.end - view.start, Math.max(duration[i] * 200, 1000));
    if (start[i] < view.start || start[i] + duration[i] > view.end || length < view.end - view.start) {
      view.show(middle - length / 2, middle + length / 2);
    }
    const top = row.y - scroller.clientHeight / 2;
    if (row.y < scroller.scrollTop || row.y + lanes.rowHeight > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = top;
    }
    keep(i);
  }

  function setFilters(laneFilter, rank) {
    view.laneFilter = byId("lanes-filter").value = laneFilter;
    view.rank = rank;
    byId("rank").value = String(rank);
    arrange();
  }

  function find(text) {
    view.find = view.find === text ? "" : text;
    byId("finder").value = view.find;
    search();
  }

  function search() {
    lanes.mask = spanFilter(view.find, data);
    page.found = lanes.mask ? lanes.mask.reduce((sum, one) => sum + one, 0) : 0;
    byId("found").textContent = lanes.mask ? `${page.found} found` : "";
    showLegend(data, palette, view, find);
    ask();
  }

  // The next found span in time, or the one before.
  function next(direction) {
    if (!page.found) return;
    const { start, count } = data.spans;
    const from = view.kept >= 0 ? [start[view.kept], view.kept] : [-1, -1];
    const isBehind = (i, [time, index]) => start[i] > time || (start[i] === time && i > index);
    let best = -1;
    let extreme = -1;
    for (let i = 0; i < count; ++i) {
      if (!lanes.mask[i] || i === view.kept) continue;
      const forward = direction > 0;
      const at = [start[i], i];
      if (isBehind(i, from) === forward && (best < 0 || isBehind(best, at) === forward)) best = i;
      if (extreme < 0 || isBehind(extreme, at) === forward) extreme = i;
    }
    goTo(best >= 0 ? best : extreme);
  }

  function setLaneHeight(by) {
    const row = lanes.rows[Math.max(0, Math.min(lanes.rows.length - 1, lanes.rowAbove(scroller.scrollTop)))];
    const offset = row ? row.y - scroller.scrollTop : 0;
    view.laneHeight = Math.max(0, Math.min(LANE_HEIGHTS.length - 1, view.laneHeight + by));
    arrange();
    const now = row && lanes.rows.find((one) => one.lane === row.lane);
    if (now) scroller.scrollTop = now.y - offset;
  }

  function choose(id, field, done) {
    byId(id).addEventListener("change", () => {
      view[field] = id === "rank" ? Number(byId(id).value) : byId(id).value;
      done();
    });
  }

  function setChoice(id, field, value, done) {
    byId(id).value = view[field] = value;
    done();
  }

  function tip(text, event) {
    const box = byId("tip");
    box.hidden = !text;
    if (!text) return;
    box.textContent = text;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 6)}px`;
    box.style.top = `${event.clientY + 18 + height < innerHeight ? event.clientY + 18 : event.clientY - height - 12}px`;
  }

  // ---- mouse

  function wheel(event, zooms) {
    const by = event.deltaY || event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.move(by / 1000);
    else if (event.ctrlKey || event.metaKey || zooms) view.zoom(Math.exp(by / 400), event.offsetX);
    else return;
    event.preventDefault();
    ask();
  }
  byId("lanes").addEventListener("wheel", (event) => wheel(event, false), { passive: false });
  byId("charts").addEventListener("wheel", (event) => wheel(event, true), { passive: false });

  let drag = null;
  byId("lanes").addEventListener("pointerdown", (event) => {
    byId("lanes").setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, start: view.start, end: view.end, scroll: scroller.scrollTop, far: false };
  });
  byId("lanes").addEventListener("pointermove", (event) => {
    if (drag) {
      const [right, down] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.far ||= Math.abs(right) + Math.abs(down) > 4;
      if (!drag.far) return;
      byId("lanes").classList.add("moving");
      view.show(drag.start - right / view.scale, drag.end - right / view.scale);
      scroller.scrollTop = drag.scroll - down;
      tip("");
      ask();
      return;
    }
    const i = lanes.spanAt(event.offsetX, event.offsetY);
    if (i !== view.pointed) ask();
    view.pointed = i;
    tip(i < 0 ? "" : tipWords(data, i), event);
  });
  byId("lanes").addEventListener("pointerup", (event) => {
    if (drag && !drag.far) keep(lanes.spanAt(event.offsetX, event.offsetY));
    drag = null;
    byId("lanes").classList.remove("moving");
  });
  byId("lanes").addEventListener("dblclick", (event) => {
    const i = lanes.spanAt(event.offsetX, event.offsetY);
    if (i < 0) return;
    const { start, duration } = data.spans;
    view.show(start[i] - duration[i], start[i] + 2 * duration[i]);
    ask();
  });
  for (const id of ["lanes", "charts"]) {
    byId(id).addEventListener("pointerleave", () => {
      view.pointed = -1;
      tip("");
      ask();
    });
  }

  let mark = null;
  byId("charts").addEventListener("pointerdown", (event) => {
    byId("charts").setPointerCapture(event.pointerId);
    mark = { x: event.offsetX, onOverview: event.offsetY < OVERVIEW_HEIGHT };
    if (mark.onOverview) moveOverview(event.offsetX);
  });
  function moveOverview(x) {
    const middle = ((x - view.gutter) / (view.width - view.gutter)) * data.end;
    const half = (view.end - view.start) / 2;
    view.show(middle - half, middle + half);
    ask();
  }
  byId("charts").addEventListener("pointermove", (event) => {
    tip(mark ? "" : charts.wordsAt(event.offsetX, event.offsetY), event);
    if (!mark) return;
    if (mark.onOverview) moveOverview(event.offsetX);
    else charts.marked = [mark.x, event.offsetX];
    ask();
  });
  byId("charts").addEventListener("pointerup", () => {
    if (charts.marked && Math.abs(charts.marked[0] - charts.marked[1]) > 4) {
      const [from, to] = [...charts.marked].sort((a, b) => a - b).map((x) => view.timeAt(Math.max(x, view.gutter)));
      view.show(from, to);
    }
    charts.marked = mark = null;
    ask();
  });

  // ---- keys and buttons

  function nextTheme() {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    recolour();
  }
  const toggle = (id, field, values, done) =>
    setChoice(id, field, values[view[field] === values[0] ? 1 : 0], done);
  const keys = {
    w: () => view.zoom(0.7), "+": () => view.zoom(0.7), "=": () => view.zoom(0.7),
    s: () => view.zoom(1 / 0.7), "-": () => view.zoom(1 / 0.7),
    a: () => view.move(-0.15), ArrowLeft: () => view.move(-0.15),
    d: () => view.move(0.15), ArrowRight: () => view.move(0.15),
    ArrowUp: () => scroller.scrollBy(0, -40), ArrowDown: () => scroller.scrollBy(0, 40),
    PageUp: () => scroller.scrollBy(0, -0.9 * scroller.clientHeight),
    PageDown: () => scroller.scrollBy(0, 0.9 * scroller.clientHeight),
    0: () => view.show(0, data.end), Home: () => view.show(0, data.end),
    "[": () => setLaneHeight(-1), "]": () => setLaneHeight(1),
    g: () => toggle("grouping", "grouping", ["sm", "role"], arrange),
    c: () => toggle("colouring", "colouring", ["expert", "step"], recolour),
    "/": () => byId("finder").focus(),
    n: () => next(1), N: () => next(-1),
    f: () => { if (view.kept >= 0 && data.spans.awaited[view.kept]) goTo(view.kept + data.spans.awaited[view.kept]); },
    t: nextTheme,
    "?": () => byId("help").showModal(),
    Escape: () => { view.find = byId("finder").value = ""; search(); keep(-1); },
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    if (event.target.matches?.("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const action = keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
    ask();
  });
  const buttons = { in: keys.w, out: keys.s, fit: keys[0], thinner: keys["["], thicker: keys["]"], theme: keys.t, "help-button": keys["?"] };
  for (const [id, action] of Object.entries(buttons)) {
    byId(id).addEventListener("click", () => { action(); ask(); });
  }
  byId("tools").addEventListener("submit", (event) => event.preventDefault());
  byId("lanes-filter").addEventListener("input", (event) => setFilters(event.target.value, view.rank));
  byId("finder").addEventListener("input", (event) => { view.find = event.target.value; search(); });
  byId("finder").addEventListener("keydown", (event) => { if (event.key === "Enter") next(event.shiftKey ? -1 : 1); });
  choose("grouping", "grouping", arrange);
  choose("colouring", "colouring", recolour);
  choose("rank", "rank", arrange);
  scroller.addEventListener("scroll", ask);
  new ResizeObserver(ask).observe(byId("view"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

  byId("colouring").value = view.colouring;
  byId("grouping").options[0].text = data.place;
  byId("rank").append(new Option("all", "-1"), ...data.ranks.map((rank) => new Option(String(rank), String(rank))));
  const said = Object.entries(data.facts).map(([name, value]) => `${name} ${value}`);
  byId("facts").textContent = [...said, words(data.end, data.unit), `${data.spans.count} steps of ${data.lanes.length} warps`].join(" · ");
  arrange();
  recolour();
  Object.assign(page, { goTo, find, next, setFilters });
  window.timeline = page; // for the console, and for tests
}

main();
