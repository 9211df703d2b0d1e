// Other numbers of devices and micro-batches, other schedules: all of the catalogue, simulated as one looks.

// The line of Python that makes an order: a pipeline on devices of this type ("cpu", "cuda"), or without a type its schedule.
function lineOf(order, type) {
  const stages = order.placement.length, count = order.devices;
  if (!type) return `pc.build_schedule("${order.name}", ${stages}, ${order.microbatches}, n_devices=${count})`;
  const devices = type === "cpu" ? `["cpu"] * ${count}` : `[f"${type}:{i}" for i in range(${count})]`;
  return `pc.compile(model, ${stages}, devices=${devices}, n_microbatches=${order.microbatches}, schedule="${order.name}", example_args=..., loss_fn=...)`;
}

class WhatIf {
  constructor(section, given) {
    Object.assign(this, { section, given, schedule: given.own.schedule });
    this.form = section.querySelector("form");
    const orders = given.orders, distinct = (key) => [...new Set(orders.map((o) => o[key]))].sort((a, b) => a - b);
    this.devices = this.choice("devices", distinct("devices"), given.own.devices);
    this.microbatches = this.choice("micro-batches", distinct("microbatches"), given.own.microbatches);
    this.links = this.choice("transfers take", [0, 0.5, 1, 2, 4, 10], 1, (n) => `${n} ×`);
    this.batch = html(html(this.form, "label", "same batch, in smaller or larger micro-batches "), "input", null, { type: "checkbox", name: "batch" });
    this.batch.checked = true;
    this.form.addEventListener("input", () => this.draw());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.chart = html(section, "div");
    this.draw();
  }

  choice(label, values, chosen, word = String) {
    const made = html(html(this.form, "label", `${label} `), "select", null, { name: label });
    for (const value of values) html(made, "option", word(value), { value });
    made.value = chosen;
    return made;
  }

  costs(order, factor = 1, links = 1) {
    const cut = this.given.costs[order.placement.length], times = (list) => list.map((value) => value * factor);
    return { forward: times(cut.forward), backward: times(cut.backward), input: times(cut.input_grad), weight: times(cut.weight_grad), saved: times(cut.saved), kept: times(cut.kept),
      routes: cut.routes.map((route) => ({ ...route, nbytes: route.nbytes * factor, seconds: route.seconds * factor * links })) };
  }

  // The order of the report of a model has the figures of the report, as long as nothing is changed.
  run(order) {
    const factor = this.batch.checked ? this.given.microbatches / order.microbatches : 1, links = Number(this.links.value);
    if (this.given.type && order === this.given.orders[0] && links === 1) return scaled(DATA.timelines[0]);
    return simulateOrder({ placement: order.placement, rows: parseRows(order.csv) }, this.costs(order, factor, links), this.given.overlaps);
  }

  found() {
    const fitting = this.given.orders.filter((o) => o.devices === Number(this.devices.value) && o.microbatches === Number(this.microbatches.value));
    return fitting.map((order) => ({ order, run: this.run(order) })).filter(({ run }) => run).sort((a, b) => a.run.makespan - b.run.makespan);
  }

  draw() {
    const found = this.found(), table = this.section.querySelector("table");
    table.replaceChildren();
    const head = html(html(table, "thead"), "tr");
    for (const [name, kind] of [["schedule", "text"], ["stages", ""], ["step", ""], ["bubble", ""], ["peak activations", ""], ["per sample", ""]]) html(head, "th", name, { class: kind });
    const body = html(table, "tbody"), base = DATA.timelines[0].makespan;
    const chosen = found.find(({ order }) => order.name === this.schedule) ?? found[0];
    for (const { order, run } of found) {
      const row = html(body, "tr", null, { class: order === chosen?.order ? "mark" : "" });
      const samples = this.batch.checked ? 1 : order.microbatches / this.given.microbatches;
      const cells = [order.name, order.placement.length, time(run.makespan), share(run.bubble), bytes(Math.max(...run.peaks)), base ? `${(run.makespan / samples / base).toFixed(3)} ×` : ""];
      cells.forEach((text, i) => html(row, "td", text, { class: i ? "" : "text" }));
      row.addEventListener("click", () => { this.schedule = order.name; this.draw(); });
    }
    this.chart.replaceChildren();
    if (!chosen) { html(this.chart, "p", "No schedule of the catalogue is here for these numbers."); return; }
    html(this.chart, "h3", `${chosen.order.name}: ${time(chosen.run.makespan)}, bubble ${share(chosen.run.bubble)}`);
    if (chosen.order !== this.given.orders[0]) html(this.chart, "pre", lineOf(chosen.order, this.given.type)); // the first is that of the report
    const names = chosen.run.rows.map((_, d) => `device ${d}`);
    View.all.delete(this.view);
    this.view = new View(chosen.run.makespan);
    legend(this.chart, chosen.run, names);
    new Gantt(this.chart, chosen.run, this.view, names, chosen.order.name);
  }
}
