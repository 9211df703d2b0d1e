// A timeline: a row per device with its copies below, and the memory of all devices under it, on one axis.

const LEFT = 84, RIGHT = 22, ROW = 26, COPY = 5, MEMORY = 110;
const KINDS = { F: "forward", R: "recompute", B: "backward", I: "input gradient", W: "weight gradient", OFFLOAD: "offload", RELOAD: "reload", UNSHARD: "gather parameters", RESHARD: "free parameters", REDUCE_GRAD: "reduce gradients" };

class Gantt {
  constructor(parent, timeline, view, devices, name) {
    Object.assign(this, { timeline, view, devices, microbatch: null });
    this.stages = timeline.rows.map((row) => [...new Set(row.map((s) => s[0]))].sort((a, b) => a - b));
    this.copies = timeline.rows.map((_, d) => timeline.copies.filter((c) => c[0] === d));
    this.hasMemory = timeline.memory.some((curve) => curve.some((step) => step[1] > 0));
    this.rowHeight = ROW + (timeline.copies.length ? COPY + 3 : 0);
    this.height = timeline.rows.length * this.rowHeight + 22 + (this.hasMemory ? MEMORY + 14 : 0);
    this.element = picture(parent, this.height, described(timeline, devices, name));
    handle(this.element, view, LEFT, () => this.width());
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", (event) => { this.light(null); hint(event, ""); });
    view.watchers.push(() => this.draw());
    this.draw();
  }

  width() { return Math.max(50, this.element.clientWidth - LEFT - RIGHT); }
  x(moment) { return LEFT + ((moment - this.view.start) / (this.view.end - this.view.start)) * this.width(); }

  draw() {
    fresh(this.element, this.height);
    const bottom = this.timeline.rows.length * this.rowHeight;
    for (const at of ticks(this.view.start, this.view.end, Math.min(10, Math.max(2, Math.floor(this.width() / 70))))) {
      svg(this.element, "line", { class: "axis", x1: this.x(at), x2: this.x(at), y1: 0, y2: this.height - 4 });
      svg(this.element, "text", { class: "soft", x: this.x(at), y: bottom + 14, "text-anchor": "middle" }, time(at));
    }
    this.timeline.rows.forEach((row, device) => {
      const top = device * this.rowHeight;
      svg(this.element, "text", { x: 0, y: top + 17 }, this.devices[device] ?? `device ${device}`);
      this.bars(row, (span) => [span[3], span[4]], (span, x, width) => this.cell(span, x, width, top + 2, device));
      this.bars(this.copies[device], (copy) => [copy[3], copy[4]], (_, x, width) =>
        svg(this.element, "rect", { x, width, y: top + ROW, height: COPY, fill: DATA.copyColour }));
    });
    if (this.hasMemory) this.memory(bottom + 24);
    this.light(this.microbatch);
  }

  // Those in view; of several that share a pixel, one.
  bars(spans, extent, make) {
    let drawn = -1;
    for (const span of spans) {
      const [start, seconds] = extent(span);
      if (start + seconds < this.view.start || start > this.view.end) continue;
      const x = Math.max(this.x(start), LEFT), right = Math.min(this.x(start + seconds), LEFT + this.width());
      if (right - drawn < 0.5) continue;
      drawn = right;
      make(span, x, Math.max(right - x - (right - x > 3 ? 0.7 : 0), 0.4));
    }
  }

  cell(span, x, width, y, device) {
    const [stage, kind, mb, , , critical] = span;
    const shade = Math.min(this.stages[device].indexOf(stage), 3);
    const look = { class: `cell${critical ? " critical" : ""}`, fill: DATA.palette[kind][shade], "data-mb": mb };
    svg(this.element, "rect", { x, width, y, height: ROW - 4, ...look });
    if (mb >= 0 && width > glyph() * String(mb).length + 2) {
      svg(this.element, "text", { x: x + width / 2, y: y + 15, "text-anchor": "middle", class: shade > 1 ? "on-dark-cell" : "on-cell", "pointer-events": "none" }, mb);
    }
  }

  memory(top) {
    const most = Math.max(...this.timeline.peaks, 1e-300), y = (size) => top + MEMORY * (1 - size / most);
    svg(this.element, "text", { class: "soft", x: 0, y: top + 10 }, bytes(most));
    svg(this.element, "text", { class: "soft", x: 0, y: top + MEMORY }, "memory");
    this.timeline.memory.forEach((curve, device) => {
      const points = [];
      let before = 0;
      for (const [at, size] of curve) {
        const x = Math.min(Math.max(this.x(at), LEFT), LEFT + this.width()).toFixed(1);
        points.push(`${x},${y(before).toFixed(1)}`, `${x},${y(size).toFixed(1)}`);
        before = size;
      }
      points.push(`${(LEFT + this.width()).toFixed(1)},${y(before).toFixed(1)}`);
      svg(this.element, "polyline", { points: points.join(" "), fill: "none", style: `stroke: ${lineColour(device, this.devices.length)}`, "stroke-width": 1.3 });
    });
  }

  point(event) {
    const box = this.element.getBoundingClientRect(), y = event.clientY - box.top;
    const at = this.view.start + ((event.clientX - box.left - LEFT) / this.width()) * (this.view.end - this.view.start);
    const device = Math.floor(y / this.rowHeight), row = this.timeline.rows[device];
    if (!row) return this.show(event, null, this.hasMemory && y > this.timeline.rows.length * this.rowHeight + 22 ? this.held(at) : "");
    if (y - device * this.rowHeight > ROW) return this.show(event, null, this.copyText(under(this.copies[device], at)));
    const span = under(row, at);
    return this.show(event, span?.[2] ?? null, span ? cellText(span) : "");
  }

  show(event, microbatch, text) {
    this.light(microbatch);
    hint(event, text);
  }

  light(microbatch) {
    this.microbatch = microbatch;
    for (const rect of this.element.querySelectorAll("rect.cell"))
      rect.classList.toggle("dim", microbatch !== null && rect.dataset.mb !== String(microbatch));
  }

  copyText(copy) {
    return copy ? `${copy[2]}\ndevice ${copy[0]} to device ${copy[1]}\n${time(copy[3])} to ${time(copy[3] + copy[4])}, ${time(copy[4])}` : "";
  }

  held(at) {
    const now = this.timeline.memory.map((curve) => curve.reduce((size, step) => (step[0] <= at ? step[1] : size), 0));
    return [`at ${time(at)}`, ...now.map((size, d) => `${this.devices[d]}: ${bytes(size)}, peak ${bytes(this.timeline.peaks[d])}`)].join("\n");
  }
}

const lineColour = (device, count) => `hsl(${250 - (190 * device) / Math.max(count - 1, 1)} 60% var(--line))`;
const under = (spans, at) => spans.find((s) => s[3] <= at && at < s[3] + s[4]);

function cellText([stage, kind, mb, start, seconds, critical]) {
  const head = `${stage}${kind}${mb}: ${KINDS[kind]} of stage ${stage}, ${String(mb).includes(".") ? "slice" : "micro-batch"} ${mb}`;
  return `${head}\n${time(start)} to ${time(start + seconds)}, ${time(seconds)}${critical ? "\non the critical path" : ""}`;
}

// The text alternative of a timeline.
function described(timeline, devices, name) {
  const rows = timeline.rows.map((row, d) => {
    const busy = timeline.makespan ? row.reduce((total, span) => total + span[4], 0) / timeline.makespan : 0, peak = timeline.peaks[d];
    return `${devices[d] ?? `device ${d}`}: ${row.length} actions, busy ${share(busy)}${peak ? `, peak activations ${bytes(peak)}` : ""}`;
  });
  return `Timeline, ${name}: ${time(timeline.makespan)}, bubble ${share(timeline.bubble)}. ${rows.join("; ")}.`;
}

function legend(parent, timeline, devices) {
  const cells = timeline.rows.flat(), used = new Set(cells.map((s) => s[1])), line = html(parent, "div", null, { class: "legend" });
  const entries = Object.keys(KINDS).filter((kind) => used.has(kind)).map((kind) => [DATA.palette[kind][0], KINDS[kind]]);
  if (timeline.copies.length) entries.push([DATA.copyColour, "copy"]);
  if (cells.some((s) => s[5])) entries.push(["", "on the critical path", "box"]);
  if (timeline.memory.some((curve) => curve.some((step) => step[1] > 0)))
    timeline.rows.forEach((_, d) => entries.push([lineColour(d, timeline.rows.length), `memory of ${devices[d] ?? `device ${d}`}`, "line"]));
  legendOf(line, entries);
}
