// The graph as it is cut: operations along a line, a band per stage, what is read later as arcs.

const BAND = 20, MIDDLE = 150, BELOW = 130;

class CutGraph {
  constructor(parent, cut) {
    this.cut = cut;
    this.view = new View(cut.nodes.length);
    this.height = BAND + MIDDLE + BELOW;
    this.longestEdge = cut.edges.reduce((most, [a, b]) => Math.max(most, b - a), 8);
    this.longestRoute = cut.routes.flatMap((r) => r.ends.map(([end]) => end - r.source)).reduce((a, b) => Math.max(a, b), 8);
    this.element = picture(parent, this.height, this.described());
    this.legend(parent.querySelector(".legend"));
    handle(this.element, this.view, 4, () => this.width());
    this.element.addEventListener("pointermove", (event) => hint(event, event.target.dataset?.text ?? ""));
    this.element.addEventListener("pointerleave", (event) => hint(event, ""));
    this.view.watchers.push(() => this.draw());
    this.draw();
  }

  described() {
    const stages = this.cut.stages.map(({ first, last, device }, s) => `stage ${s} on ${device} has ${last - first} operations`);
    const ends = this.cut.routes.flatMap((route) => route.ends), skips = ends.filter(([, , isSkip]) => isSkip).length;
    return `The cut: ${stages.join("; ")}. ${ends.length} values cross to another stage, ${skips} of them over a stage.`;
  }

  legend(line) {
    const entries = [["var(--edge)", "read later in the same stage", "line"], ["var(--route)", "crosses a cut", "line"]];
    if (this.cut.routes.some((route) => route.ends.some(([, , isSkip]) => isSkip))) entries.push(["var(--mark)", "passes over a stage", "line"]);
    legendOf(line, entries);
  }

  width() { return Math.max(50, this.element.clientWidth - 8); }
  x(position) { return 4 + ((position - this.view.start) / (this.view.end - this.view.start)) * this.width(); }
  isSeen(a, b) { return b >= this.view.start && a <= this.view.end; }

  draw() {
    fresh(this.element, this.height);
    const line = BAND + MIDDLE, step = this.width() / (this.view.end - this.view.start);
    this.cut.stages.forEach((stage, s) => this.band(stage, s));
    const drawn = this.cut.edges.filter(([a, b]) => this.isSeen(a, b) && (b - a > 1 || step > 6)); // neighbours when there is room
    for (const [a, b] of drawn) this.arc(a, b, line, -1, { class: "edge" });
    for (const route of this.cut.routes) this.route(route, line);
    this.cut.nodes.forEach(([name, module, stage], i) => {
      if (!this.isSeen(i, i + 1)) return;
      const text = `${name}\n${module ? `in ${module}\n` : ""}stage ${stage}`;
      svg(this.element, "circle", { class: "node", cx: this.x(i + 0.5), cy: line, r: Math.min(5, Math.max(1.4, step * 0.35)), "data-text": text });
      if (step > 13) svg(this.element, "text", { x: 0, y: 0, transform: `translate(${this.x(i + 0.5) + 4} ${line - 8}) rotate(-60)`, "pointer-events": "none" }, name);
    });
  }

  band({ first, last, device }, s) {
    if (!this.isSeen(first, last)) return;
    const left = Math.max(this.x(first), 4), right = Math.min(this.x(last), 4 + this.width());
    svg(this.element, "rect", { x: left, width: Math.max(right - left, 0), y: 0, height: this.height, class: "band", fill: DATA.bands[s % DATA.bands.length] });
    svg(this.element, "line", { x1: this.x(first), x2: this.x(first), y1: 0, y2: this.height, class: "boundary", "stroke-dasharray": s ? "4 3" : "0 9" });
    const words = [`stage ${s}, ${device}: ${last - first} operations`, `stage ${s}`, String(s)];
    const fitting = words.find((word) => glyph() * 0.89 * word.length < right - left - 6);
    if (fitting) svg(this.element, "text", { x: left + 4, y: 14 }, fitting);
  }

  arc(a, b, line, side, look, text = "") {
    const x1 = this.x(a + 0.5), x2 = this.x(b + 0.5), room = (side < 0 ? MIDDLE : BELOW) - 12;
    const bend = side * room * Math.sqrt((b - a) / (side < 0 ? this.longestEdge : this.longestRoute)) * 1.33;
    const path = { d: `M${x1} ${line} C${x1} ${line + bend} ${x2} ${line + bend} ${x2} ${line}`, fill: "none", ...look };
    if (text) path["data-text"] = text;
    svg(this.element, "path", path);
  }

  route({ value, source, ends, nbytes, gradient }, line) {
    for (const [end, stage, isSkip] of ends) {
      if (!this.isSeen(source, end)) continue;
      const text = `${value} to stage ${stage}${isSkip ? ", a skip" : ""}\n${bytes(nbytes)} per micro-batch${gradient ? ", and its gradient back" : ""}`;
      const look = { class: isSkip ? "route skip" : "route" };
      this.arc(source, end, line, 1, look, text);
    }
  }
}
