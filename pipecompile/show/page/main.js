// Puts the page together from DATA.

function facts() {
  document.title = DATA.title;
  document.getElementById("title").textContent = DATA.title;
  pairs(document.getElementById("facts"), DATA.facts);
}

function pairs(list, rows) {
  for (const [name, value] of rows) {
    const pair = html(list, "div");
    html(pair, "dt", name);
    html(pair, "dd", value);
  }
}

function environment() {
  const section = shown("environment"), { facts, again } = DATA.environment;
  pairs(section.querySelector("dl"), facts);
  section.querySelector("pre").textContent = again;
  if (!again) for (const part of section.querySelectorAll("pre, .note")) part.remove();
}

function shown(id) {
  const section = document.getElementById(id);
  section.hidden = false;
  return section;
}

function fillTable(table, columns, marked = -1) {
  const head = html(html(table, "thead"), "tr"), body = html(table, "tbody"), foot = html(html(table, "tfoot"), "tr");
  for (const column of columns) {
    const look = { class: column.text ? "text" : "" };
    html(head, "th", column.name, look);
    html(foot, "td", column.total, look);
  }
  columns[0].cells.forEach((_, i) => {
    const row = html(body, "tr", null, { class: i === marked ? "mark" : "" });
    for (const column of columns) html(row, "td", column.cells[i], { class: column.text ? "text" : "" });
  });
}

function stageTable() {
  const section = shown("stages"), { columns, slowest, caption } = DATA.table;
  fillTable(section.querySelector("table"), columns, slowest);
  section.querySelector(".note").textContent = caption;
}

function tableWithRemarks(id, { columns, remarks }) {
  const section = shown(id), list = section.querySelector("ul");
  fillTable(section.querySelector("table"), columns);
  for (const line of remarks) html(list, "li", line);
}

function scaled(timeline) {
  const at = (ticks) => ticks * timeline.tick;
  return { ...timeline,
    rows: timeline.rows.map((row) => row.map(([stage, kind, mb, start, length, critical]) => [stage, kind, mb, at(start), at(length), critical])),
    copies: timeline.copies.map(([from, to, name, start, length]) => [from, to, name, at(start), at(length)]),
    memory: timeline.memory.map((curve) => curve.map(([moment, size]) => [at(moment), size])) };
}

// Each timeline fills the width; on request all have the scale of the longest, and move together.
function timelines() {
  const section = document.getElementById("timelines"), all = DATA.timelines.map(scaled), charts = html(section, "div");
  const longest = Math.max(...all.map((t) => t.makespan));
  const draw = (isCommon) => {
    charts.replaceChildren();
    for (const view of draw.views ?? []) View.all.delete(view);
    const common = isCommon ? new View(longest) : null, views = all.map((t) => common ?? new View(t.makespan));
    draw.views = new Set(views);
    all.forEach((timeline, i) => {
      html(charts, "h3", `${timeline.name}: ${time(timeline.makespan)}, bubble ${share(timeline.bubble)}`);
      legend(charts, timeline, DATA.devices);
      new Gantt(charts, timeline, views[i], DATA.devices, timeline.name);
    });
  };
  if (all.length > 1) {
    const form = html(null, "form"), box = html(html(form, "label", "the same scale for all "), "input", null, { type: "checkbox", name: "scale" });
    box.addEventListener("input", () => draw(box.checked));
    form.addEventListener("submit", (event) => event.preventDefault());
    charts.before(form);
  }
  draw(false);
}

function advice() {
  const list = shown("advice").querySelector("ul");
  for (const line of DATA.advice) html(list, "li", line);
}

function whatIf() {
  const section = shown("what-if");
  section.querySelector(".note").textContent = DATA.whatIf.note;
  new WhatIf(section, DATA.whatIf);
}

facts();
if (DATA.table) stageTable();
for (const id of ["compared", "memory"]) if (DATA[id]) tableWithRemarks(id, DATA[id]);
timelines();
if (DATA.advice.length) advice();
if (DATA.cut) new CutGraph(shown("cut"), DATA.cut);
if (DATA.whatIf) whatIf();
if (DATA.environment) environment();
addEventListener("resize", () => View.all.forEach((view) => view.show(view.start, view.end)));
