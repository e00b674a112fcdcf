// What is said of a span, and the legend.

function facts(data, i) {
  const { spans, steps } = data;
  const step = steps[spans.step[i]];
  const found = [];
  const add = (name, column) => {
    if (spans[column][i] >= 0) found.push([name, String(spans[column][i])]);
  };
  add("expert", "expert");
  add("m-block", "m_block");
  add("n-block", "n_block");
  add("rows", "rows");
  if (step.phase) found.push(["phase", step.phase]);
  found.push(["duration", words(spans.duration[i], data.unit)]);
  found.push(["from", words(spans.start[i], data.unit)]);
  found.push(["to", words(spans.start[i] + spans.duration[i], data.unit)]);
  if (step.awaited) found.push(["waits for", step.awaited]);
  if (spans.awaited[i]) {
    const other = i + spans.awaited[i];
    found.push(["that was", `${laneName(data, data.lanes[spans.lane[other]])}: ${steps[spans.step[other]].name}${blockWords(spans, other)}`]);
    found.push(["there at", words(awaitedMoment(data, i), data.unit)]);
  }
  return found;
}

function blockWords(spans, i) {
  if (spans.expert[i] < 0) return "";
  return `, expert ${spans.expert[i]}, m-block ${spans.m_block[i]}, n-block ${spans.n_block[i]}`;
}

function tipWords(data, i) {
  const { spans, steps, lanes } = data;
  const rows = facts(data, i).map(([name, value]) => `${name}: ${value}`);
  return [steps[spans.step[i]].name, laneName(data, lanes[spans.lane[i]]), ...rows].join("\n");
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function showDetails(data, i, goTo) {
  const place = document.getElementById("details");
  if (i < 0) {
    place.replaceChildren(element("p", { class: "hint" }, "Point at a block; click to keep it here."));
    return;
  }
  const { spans, steps, lanes } = data;
  const list = element("dl");
  for (const [name, value] of facts(data, i)) list.append(element("dt", {}, name), element("dd", {}, value));
  place.replaceChildren(
    element("h2", {}, steps[spans.step[i]].name),
    element("p", { class: "hint" }, laneName(data, lanes[spans.lane[i]])),
    list,
  );
  if (spans.awaited[i]) {
    const go = () => goTo(i + spans.awaited[i]);
    place.append(element("button", { type: "button", id: "go", onclick: go }, "go to what it waited for (f)"));
  }
}

const MOST_EXPERTS = 96; // in the legend

function showLegend(data, palette, view, find) {
  const { spans, steps } = data;
  const used = new Set(spans.step);
  const key = (step, index) => {
    const expert = hasExpert.has(index) ? data.experts[0] : -1;
    const colour = css(palette.colour(index, expert));
    const mark = element("i", { style: `background:${colour}`, class: step.awaited ? "wait" : "work" });
    const chosen = view.find === step.name ? " chosen" : "";
    const button = { type: "button", class: `key${chosen}`, title: "find these", onclick: () => find(step.name) };
    return element("button", button, mark, step.name);
  };
  const hasExpert = new Set();
  for (let i = 0; i < spans.count; ++i) if (spans.expert[i] >= 0) hasExpert.add(spans.step[i]);
  const place = document.getElementById("legend");
  place.replaceChildren();
  if (view.colouring === "expert" && data.experts.length) {
    const experts = element("div", { class: "experts" });
    for (const expert of data.experts.slice(0, MOST_EXPERTS)) {
      const chosen = view.find === `expert ${expert}` ? "chosen" : "";
      const style = `background:${css(fromHsl(expertHue(expert), 0.72, 0.46))}`;
      const title = `find the blocks of expert ${expert}`;
      const onclick = () => find(`expert ${expert}`);
      experts.append(element("button", { type: "button", class: chosen, style, title, onclick }, String(expert)));
    }
    place.append(element("h2", {}, "experts of a rank"), experts);
  }
  const hasExperts = view.colouring === "expert" && data.experts.length > 0;
  const work = element("section", {}, element("h2", {}, hasExperts ? "work (as of the first expert)" : "work"));
  const waits = element("section", {}, element("h2", {}, "waits (thin lines)"));
  steps.forEach((step, index) => {
    if (used.has(index)) (step.awaited ? waits : work).append(key(step, index));
  });
  place.append(work, waits);
}
