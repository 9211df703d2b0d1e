// What a schedule takes under given costs: as `pipecompile.simulate` of a chain, in the browser.
//
//   order   { placement: [device of each stage], rows: [[action]] }     action   [stage, kind, micro-batch]
//   costs   { forward, input, weight, saved: [per stage], transfer: [from each stage to the next] }
//
// An action starts when its device is free and what it waits for is there; copies between two devices queue. Linear.

function parseRows(csv) {
  const cells = (line) => [...line.matchAll(/(\d+)([FRBIW])(\d+)/g)].map((m) => [+m[1], m[2], +m[3]]);
  return csv.trimEnd().split("\n").map(cells);
}

function secondsOf(costs, stage, kind) {
  if (kind === "F" || kind === "R") return costs.forward[stage];
  if (kind === "I") return costs.input[stage];
  return costs.weight[stage] + (kind === "B" ? costs.input[stage] : 0);
}

function simulateOrder(order, costs) {
  const { placement, rows } = order;
  const free = rows.map(() => 0), heads = rows.map(() => 0), links = new Map(), arrived = new Map();
  const spans = rows.map(() => []), copies = [], asleep = new Map();
  const ready = rows.map((_, device) => device);
  const last = placement.length - 1;

  const awaited = ([stage, kind, mb]) => {
    if (kind === "F") return stage ? `F${stage} ${mb}` : null;
    return (kind === "B" || kind === "I") && stage < last ? `B${stage} ${mb}` : null;
  };
  const hand = (what, source, target, name, end, seconds) => {
    let at = end;
    if (placement[source] !== placement[target] && seconds > 0) {
      const way = `${placement[source]} ${placement[target]}`;
      const start = Math.max(end, links.get(way) ?? 0);
      at = start + seconds;
      links.set(way, at);
      copies.push([placement[source], placement[target], name, start, seconds]);
    }
    arrived.set(what, at);
    if (asleep.has(what)) ready.push(asleep.get(what));
    asleep.delete(what);
  };
  while (ready.length) {
    const device = ready.pop();
    while (heads[device] < rows[device].length) {
      const action = rows[device][heads[device]], what = awaited(action);
      if (what !== null && !arrived.has(what)) { asleep.set(what, device); break; }
      const [stage, kind, mb] = action, seconds = secondsOf(costs, stage, kind);
      const start = Math.max(free[device], what === null ? 0 : arrived.get(what)), end = start + seconds;
      spans[device].push([stage, kind, mb, start, seconds, 0]);
      free[device] = end;
      heads[device] += 1;
      if (kind === "F" && stage < last) hand(`F${stage + 1} ${mb}`, stage, stage + 1, `v${stage}#${mb}`, end, costs.transfer[stage]);
      if ((kind === "B" || kind === "I") && stage) hand(`B${stage - 1} ${mb}`, stage, stage - 1, `v${stage - 1}'${stage}#${mb}`, end, costs.transfer[stage - 1]);
    }
  }
  return asleep.size ? null : summed({ rows: spans, copies, memory: rows.map((_, d) => memoryCurve(spans[d], costs)) });
}

// What is saved from the start of F (or R) to the end of B or W; a forward that is recomputed keeps nothing.
function memoryCurve(spans, costs) {
  const again = new Set(spans.filter((s) => s[1] === "R").map((s) => `${s[0]} ${s[2]}`));
  const steps = [];
  for (const [stage, kind, mb, start, seconds] of spans) {
    if (kind === "R" || (kind === "F" && !again.has(`${stage} ${mb}`))) steps.push([start, costs.saved[stage]]);
    if (kind === "B" || kind === "W") steps.push([start + seconds, -costs.saved[stage]]);
  }
  steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let held = 0;
  return [[0, 0], ...steps.map(([at, more]) => [at, (held += more)])];
}

function summed(found) {
  const ends = found.rows.flat().map((s) => s[3] + s[4]).concat(found.copies.map((c) => c[3] + c[4]));
  const makespan = ends.reduce((a, b) => Math.max(a, b), 0);
  const busy = found.rows.flat().reduce((total, s) => total + s[4], 0);
  const peaks = found.memory.map((curve) => curve.reduce((most, step) => Math.max(most, step[1]), 0));
  return { ...found, makespan, peaks, bubble: makespan ? 1 - busy / (found.rows.length * makespan) : 0 };
}
