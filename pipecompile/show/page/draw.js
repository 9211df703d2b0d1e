// SVG elements, numbers for people, the hint under the pointer, and the part of an axis that is in view.

function svg(parent, tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  parent?.append(made);
  return made;
}

// The picture fills the width of the page; printed on another width, it is scaled.
function picture(parent, height, label) {
  return svg(parent, "svg", { height, role: "img", "aria-label": label, tabindex: 0 });
}
function fresh(element, height) {
  element.replaceChildren();
  element.setAttribute("viewBox", `0 0 ${Math.max(element.clientWidth, 1)} ${height}`);
}

// Entries of a legend: [colour, text, form], where the form is "" for an area, "line" or "box".
function legendOf(line, entries) {
  for (const [colour, text, form] of entries) {
    const style = form === "box" ? "" : form === "line" ? `border-color: ${colour}` : `background: ${colour}`;
    html(html(line, "span"), "i", null, { class: form ?? "", style }).after(text);
  }
}

const isLarge = () => matchMedia("(min-width: 2400px)").matches;
const glyph = () => (isLarge() ? 9.5 : 7); // pixels of a digit

function html(parent, tag, text = null, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}

const SECONDS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

function withUnit(scale, value) {
  const [name, size] = scale.find(([, least]) => Math.abs(value) >= least) ?? scale[scale.length - 1];
  return `${Number((value / size).toPrecision(4))} ${name}`;
}
const time = (value) => (value && DATA.seconds ? withUnit(SECONDS, value) : String(Number(value.toPrecision(5))));
const bytes = (value) => (value && DATA.seconds ? withUnit(BYTES, value) : String(Number(value.toPrecision(5))));
const share = (value) => `${(100 * value).toFixed(1)} %`;

function hint(event, text) {
  const box = document.getElementById("hint");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  box.style.left = `${Math.max(0, left)}px`;
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 8)}px`;
}

// The interval of an axis that is in view, shared by the charts that show it.
class View {
  static all = new Set();
  constructor(whole) {
    View.all.add(this);
    this.whole = whole;
    this.start = 0;
    this.end = whole;
    this.watchers = [];
  }
  show(start, end) {
    const width = Math.min(Math.max(end - start, this.whole * 1e-5), this.whole);
    this.start = Math.min(Math.max(start, 0), this.whole - width);
    this.end = this.start + width;
    for (const watcher of this.watchers) watcher();
  }
  zoom(factor, around) {
    this.show(around - (around - this.start) * factor, around + (this.end - around) * factor);
  }
}

// Wheel with Ctrl, Cmd or Shift, drag, double click and keys of an element whose inside is `width()` pixels from `left` on. The wheel alone scrolls the page.
function handle(element, view, left, width) {
  const at = (event) => {
    const inside = (event.clientX - element.getBoundingClientRect().left - left) / width();
    return view.start + Math.min(Math.max(inside, 0), 1) * (view.end - view.start);
  };
  element.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    view.zoom(Math.exp((event.deltaY || event.deltaX) * 0.0015), at(event));
  }, { passive: false });
  element.addEventListener("keydown", (event) => {
    const width = view.end - view.start, middle = view.start + width / 2, step = width / 5;
    const keys = { "+": () => view.zoom(0.7, middle), "-": () => view.zoom(1 / 0.7, middle), 0: () => view.show(0, view.whole),
      ArrowLeft: () => view.show(view.start - step, view.end - step), ArrowRight: () => view.show(view.start + step, view.end + step) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  let held = null;
  element.addEventListener("pointerdown", (event) => { held = event.clientX; element.setPointerCapture(event.pointerId); });
  element.addEventListener("pointerup", () => { held = null; });
  element.addEventListener("pointermove", (event) => {
    if (held === null) return;
    const moved = ((held - event.clientX) / width()) * (view.end - view.start);
    held = event.clientX;
    view.show(view.start + moved, view.end + moved);
  });
  element.addEventListener("dblclick", () => view.show(0, view.whole));
}

// Round steps, at most `count` of them.
function ticks(start, end, count) {
  const rough = (end - start) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let at = Math.ceil(start / step) * step; at <= end; at += step) found.push(at);
  return found;
}
