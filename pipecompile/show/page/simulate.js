// What a schedule takes under given costs: as `pipecompile.simulate` of its program, in the browser.
//
//   order   { placement: [device of each stage], rows: [[action]] }     action   [stage, kind, micro-batch]
//   costs   { forward, backward, input, weight, saved, kept: [per stage], routes: [route] }
//   route   { source, ends: [stage], nbytes, gradient, seconds }        a stage of -1 is the host
//
// An action starts when its device is free and what it reads is there; copies between two devices queue. Linear. `lingers`: copies run
// beside compute, so that values live longer.

const HOST = -1;

function parseRows(csv) {
  const cells = (line) => [...line.matchAll(/(\d+)([FRBIW])(\d+)/g)].map((m) => [+m[1], m[2], +m[3]]);
  return csv.trimEnd().split("\n").map(cells);
}

function secondsOf(costs, stage, kind) {
  if (kind === "F" || kind === "R") return costs.forward[stage];
  return { B: costs.backward, I: costs.input, W: costs.weight }[kind][stage];
}

// The consumers of a value whose gradients one device adds up, the last of which sends the sum: those that eager autograd adds first.
function summedEnds({ placement, rows }, { source, ends, gradient }) {
  const falling = [...ends].sort((a, b) => b - a), device = placement[falling[0]];
  if (!gradient || source === HOST || ends.includes(HOST) || device === placement[source]) return [];
  const stop = falling.findIndex((end) => placement[end] !== device), group = stop < 0 ? falling : falling.slice(0, stop);
  const begun = (stage) => rows[device].flatMap(([s, kind, mb], at) => (s === stage && "BI".includes(kind) ? [[mb, at]] : [])).sort((a, b) => a[0] - b[0]);
  const follows = (a, b) => begun(a).every(([, at], i) => at < begun(b)[i][1]);
  return group.length > 1 && group.slice(1).every((stage, i) => follows(group[i], stage)) ? group : [];
}

// A function from an action to what it reads and writes. A value has its bytes, the device that makes it, those that need it, and the stages whose backwards may hold it.
function operandsOf({ placement, rows }, { saved, kept, routes }) {
  const cells = rows.flat(), again = new Set(cells.filter((a) => a[1] === "R").map((a) => `${a[0]} ${a[2]}`));
  const trained = new Set(cells.filter((a) => a[1] !== "F").map((a) => a[0]));
  const place = (stage) => (stage === HOST ? HOST : placement[stage]);
  const named = routes.map((route, i) => ({ ...route, group: summedEnds({ placement, rows }, route), name: route.source === HOST ? `x${i}` : `v${route.source}${routes.findIndex((r) => r.source === route.source) === i ? "" : `.${i}`}` }));
  const into = placement.map((_, s) => named.filter((r) => r.ends.includes(s))), out = placement.map((_, s) => named.filter((r) => r.source === s));
  const own = (name, stage, mb, nbytes) => ({ name: `@${stage}${name}#${mb}`, nbytes, from: placement[stage], to: [], cell: `${stage} ${mb}` });
  const value = (r, mb) => ({ name: `${r.name}#${mb}`, nbytes: r.nbytes, from: place(r.source), to: [...new Set(r.ends.map(place))], seconds: r.seconds, holders: r.ends.map((s) => `${s} ${mb}`) });
  const sends = (r, end) => !r.group.includes(end) || end === r.group.at(-1), before = (r, stage) => r.group[r.group.indexOf(stage) - 1];
  const gradient = (r, end, mb) => ({ name: `${r.name}'${end === HOST ? "host" : end}#${mb}`, nbytes: r.nbytes, from: place(end), to: sends(r, end) ? [place(r.source)] : [], seconds: r.seconds, holders: [`${r.source} ${mb}`] });
  return ([stage, kind, mb]) => {
    const inputs = into[stage].map((r) => value(r, mb)), saves = own("", stage, mb, saved[stage]), recipe = own(".r", stage, mb, 0), rest = own(".w", stage, mb, kept[stage]);
    if (kind === "F") return [inputs, [...out[stage].map((r) => value(r, mb)), ...(trained.has(stage) ? [again.has(`${stage} ${mb}`) ? recipe : saves] : [])]];
    if (kind === "R") return [[recipe, ...inputs], [saves]];
    if (kind === "W") return [[rest], []];
    const arriving = out[stage].filter((r) => r.gradient).flatMap((r) => r.ends.filter((end) => sends(r, end)).map((end) => gradient(r, end, mb)));
    for (const r of into[stage]) if (before(r, stage) !== undefined) arriving.push(gradient(r, before(r, stage), mb));
    const leaving = into[stage].filter((r) => r.gradient).map((r) => gradient(r, stage, mb));
    return [[saves, ...arriving], kind === "I" ? [...leaving, { ...rest, late: true }] : leaving];
  };
}

function simulateOrder(order, costs, lingers = false) {
  const { rows } = order, operands = operandsOf(order, costs);
  const free = rows.map(() => 0), heads = rows.map(() => 0), links = new Map(), arrived = new Map();
  const spans = rows.map(() => []), copies = [], asleep = new Map(), lives = rows.map(() => new Map());
  const ready = rows.map((_, device) => device);

  const live = (device, value, start, index, traits = {}) => {
    const known = lives[device].get(value.name);
    if (known) known.last = Math.max(known.last, index);
    else lives[device].set(value.name, { start, nbytes: value.nbytes, last: index, cell: value.cell, until: 0, ...traits });
  };
  const send = (value, source, target, end) => {
    let start = end, at = end;
    if (value.seconds > 0) {
      const way = `${source} ${target}`;
      start = Math.max(end, links.get(way) ?? 0);
      at = start + value.seconds;
      links.set(way, at);
      copies.push([source, target, value.name, start, value.seconds]);
    }
    live(target, value, start, -1, { holders: value.holders });
    Object.assign(lives[source].get(value.name), { sent: true, until: Math.max(lives[source].get(value.name).until, at) });
    hand(value, target, at);
  };
  const hand = (value, target, at) => {
    const what = `${value.name} ${target}`;
    arrived.set(what, at);
    for (const device of asleep.get(what) ?? []) ready.push(device);
    asleep.delete(what);
  };
  while (ready.length) {
    const device = ready.pop();
    while (heads[device] < rows[device].length) {
      const index = heads[device], action = rows[device][index], [stage, kind, mb] = action, [reads, writes] = operands(action);
      const missing = reads.find((value) => value.from !== HOST && !arrived.has(`${value.name} ${device}`));
      if (missing) { const what = `${missing.name} ${device}`; asleep.set(what, [...(asleep.get(what) ?? []), device]); break; }
      const seconds = secondsOf(costs, stage, kind);
      const start = Math.max(free[device], ...reads.map((value) => arrived.get(`${value.name} ${device}`) ?? 0)), end = start + seconds;
      for (const value of reads) live(device, value, free[device], index);
      spans[device].push([stage, kind, mb, start, seconds, 0]);
      for (const value of writes) {
        live(device, value, value.late ? end : start, index);
        hand(value, device, end);
        for (const target of value.to) if (target !== device && target !== HOST) send(value, device, target, end);
      }
      free[device] = end;
      heads[device] += 1;
    }
  }
  return asleep.size ? null : summed({ rows: spans, copies, memory: rows.map((_, d) => memoryCurve([...lives[d].values()], spans[d], lingers)) });
}

// Every value from its start to the end of its last use and of its copies. If it lingers, what is sent is freed one action later, and what is received with what may hold it.
function memoryCurve(lives, spans, lingers) {
  const held = new Map(), steps = [], end = (index) => (spans.length ? spans[index][3] + spans[index][4] : 0);
  for (const life of lives) if (life.cell) held.set(life.cell, Math.max(held.get(life.cell) ?? -1, life.last));
  for (const { start, nbytes, last, until, sent, holders } of lives) {
    if (!nbytes) continue;
    const index = !lingers ? last : sent ? Math.min(last + 1, spans.length - 1) : Math.max(last, ...(holders ?? []).map((cell) => held.get(cell) ?? -1));
    steps.push([start, nbytes], [Math.max(end(index), until), -nbytes]);
  }
  steps.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let total = 0;
  return [[0, 0], ...steps.map(([at, more]) => [at, (total += more)])];
}

function summed(found) {
  const ends = found.rows.flat().map((s) => s[3] + s[4]).concat(found.copies.map((c) => c[3] + c[4]));
  const makespan = ends.reduce((a, b) => Math.max(a, b), 0);
  const busy = found.rows.flat().reduce((total, s) => total + s[4], 0);
  const peaks = found.memory.map((curve) => curve.reduce((most, step) => Math.max(most, step[1]), 0));
  return { ...found, makespan, peaks, bubble: makespan ? 1 - busy / (found.rows.length * makespan) : 0 };
}
