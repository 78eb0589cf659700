// Updates: where a weight lands on its format's grid, and where four sums of many updates end.

const add = (f, a, b) => round(f, Math.fround(a + b)); // as torch does: in float32, then rounded

function race(f, start, terms) { // every total on the way, the start included
  const totals = [round(f, start)];
  for (const term of terms) totals.push(add(f, totals.at(-1), term));
  return totals;
}

function kahan(f, start, terms) { // what an addition has lost joins the next term
  const totals = [round(f, start)];
  let lost = 0;
  for (const term of terms) {
    const total = totals.at(-1), corrected = add(f, term, -lost), sum = add(f, total, corrected);
    lost = add(f, add(f, sum, -total), -corrected);
    totals.push(sum);
  }
  return totals;
}

function grid(f, low, high) { // the numbers of the format from low to high
  const values = [];
  for (let bits = encode(f, low), last = -1; bits !== last && decode(f, bits) <= high;
    last = bits, bits = step(f, bits, 1)) values.push(decode(f, bits));
  return values.filter(value => value >= low);
}

function stuck(name, totals) { // the addition from which on none counts, 0 if the last one did;
  const last = totals.at(-1); // Kahan's sum only waits until what it has lost is large enough
  const counted = totals.findLastIndex(total => total !== last) + 1;
  return name.includes("Kahan") || counted >= totals.length - 1 ? 0 : counted + 1;
}

function landing(f, weight, update) { // what one update, a float32 number, does, in words
  const stored = add(f, weight, Math.fround(update));
  const sum = `${written(weight)} ${update < 0 ? "−" : "+"} ${words(Math.abs(update))}`;
  if (update === 0) return `${f.name} holds ${written(weight)}.`;
  if (stored === weight) return `${f.name}: ${sum} is rounded back to ${written(weight)}: the update is lost.`;
  return `${f.name}: ${sum} becomes ${written(stored)}.`;
}

const words = x => { // a power of two below 1 as such
  const k = Math.log2(Math.abs(x));
  return Number.isInteger(k) && k < 0 ? `${x < 0 ? "−" : ""}${power(k)}` : written(x);
};

const LOOKS = {fp32: ["--line", "", 7], bf16: ["--blue", "7 3", 2.2], fp16: ["--red", "10 2 2 2", 2.2],
  "fp16 + Kahan": ["--green", "2 3", 2.2]};

function line(x1, y1, x2, y2, attributes) {
  return make("line", {x1, y1, x2, y2, stroke: "var(--quiet)", ...attributes});
}

function label(x, y, text, attributes) {
  return make("text", {x, y, "text-anchor": "middle", ...attributes}, text);
}

// The number line around a weight: the sum of weight and update, and the number that it becomes.
function landscape(f, w, update, width) {
  const u = Math.fround(update), stored = add(f, w, u), lost = stored === w, bits = encode(f, w);
  const [below, above] = [-1, 1].map(by => decode(f, step(f, bits, by))), reach = 5 * (above - w);
  const x = value => width / 2 + Math.max(-1, Math.min((value - w) / reach, 1)) * (width / 2 - 10);
  const [left, right] = [x((below + w) / 2), x((w + above) / 2)], far = Math.abs(u) > reach;
  const tip = x(w + u), back = u < 0 ? 9 : -9;
  const nodes = [
    make("rect", {x: left, y: 46, width: right - left, height: 84, fill: "var(--red)", opacity: 0.18}),
    label(8, 14, `${f.name} around ${written(w, 8)}`, {class: "strong", "text-anchor": "start"}),
    label(x(w), 40, "sums in the band are lost", {fill: "var(--red-text)", class: "quiet"}),
    line(4, 112, width - 4, 112),
    ...grid(f, w - reach, w + reach).map(value => line(x(value), 102, x(value), 122, {"stroke-width": 1.5})),
    line(x(w), 66, x(w), 78, {stroke: "var(--ink)"}),
    line(x(w), 72, tip, 72, {stroke: "var(--ink)", "stroke-width": 2}),
    make("path", {d: `M${tip + back} 67L${tip} 72l${back} 5`, fill: "none", stroke: "var(--ink)",
      "stroke-width": 2}),
    label(Math.abs(tip - x(w)) < 60 ? tip + (u < 0 ? -34 : 34) : (x(w) + tip) / 2,
      64, words(update)),
    label(x(w), 144, written(w, 8))];
  if (far) nodes.push(label(tip, 92, "further off", {"text-anchor": u < 0 ? "start" : "end", class: "quiet"}));
  else nodes.push(line(tip, 76, x(stored), 106, {"stroke-dasharray": "3 3"}),
    make("circle", {cx: x(stored), cy: 112, r: 6, fill: `var(${lost ? "--red" : "--blue"})`}));
  if (!lost && !far) nodes.push(label(x(stored), 162, written(stored, 8), {class: "strong"}));
  return {nodes, reach};
}

// The four sums as curves, each named where it ends.
function curves(runs, moving, width) {
  const all = Object.values(runs).flatMap(totals => totals);
  const [low, high] = [Math.min(...all), Math.max(...all)], [start] = runs.fp32;
  const count = runs.fp32.length - 1;
  const x = i => 8 + i / count * (width - 180), y = v => 166 - (v - low) / (high - low || 1) * 130;
  const drawn = make("g"), names = make("g"), each = Math.ceil(count / 200);
  const ends = Object.entries(runs).sort((a, b) => a[1].at(-1) - b[1].at(-1));
  let free = 182;
  ends.forEach(([name, totals], i) => {
    const [color, dash, broad] = LOOKS[name], end = totals.at(-1), points = [];
    for (let n = 0; n <= count; n += each) points.push(`${x(n).toFixed(1)},${y(totals[n]).toFixed(1)}`);
    points.push(`${x(count)},${y(end)}`);
    const look = {fill: "none", stroke: `var(${color})`, "stroke-width": broad, "stroke-dasharray": dash};
    drawn[name === "fp32" ? "prepend" : "append"](make("polyline", {points: points.join(" "), ...look}));
    free = Math.max(Math.min(free - 17, y(end)), 22 + 17 * (3 - i));
    const note = written(end, 5) + (moving && stuck(name, totals) ? ", stuck" : "");
    names.append(line(width - 168, free, width - 148, free, look),
      label(width - 142, free + 4, `${name}: ${note}`, {"text-anchor": "start"}));
  });
  return [label(8, 14, `${count.toLocaleString("en")} updates, from ${written(start, 8)} on`, {class: "strong", "text-anchor": "start"}),
    line(8, 176, x(count), 176), drawn, names];
}

function figure(stage, {formats, weights, updates, weight, update, times}) {
  const byName = Object.fromEntries(formats.map(one => [one.name, one]));
  const signed = [...updates.map(x => -x).reverse(), 0, ...updates];
  const state = {format: "bf16", weight, update, times};
  const change = part => { Object.assign(state, part); stage.redraw(); };
  const steer = slider("update", {min: 0, max: signed.length - 1, value: signed.indexOf(update)},
    i => words(signed[i]), i => change({update: signed[i]}));
  const [ground, sums] = [0, 1].map(() => make("svg", {height: 190, "aria-hidden": "true"}));
  const start = () => matchMedia("(prefers-reduced-motion: reduce)").matches || sums.children[2].animate(
    [{clipPath: "inset(-9px 100% -9px 0)"}, {clipPath: "inset(-9px 0 -9px 0)"}], 2000);
  stage.controls.append(
    slider("weight", {min: 0, max: weights.length - 1, value: weights.indexOf(weight)},
      i => written(weights[i]), i => change({weight: weights[i]})),
    steer,
    choice("weight kept in", Object.fromEntries(formats.map(({name}) => [name, name])), state.format,
      format => change({format})),
    choice("additions", {100: "100", 1000: "1,000", 10000: "10,000"}, String(times),
      count => change({times: Number(count)})),
    button("▶ race", start));
  stage.picture.append(
    make("style", {}, ".picture { display: flex; flex-wrap: wrap; gap: .6rem; } svg { touch-action: pan-y; user-select: none; }"),
    ground, sums);

  let reach = 0;
  const drag = event => { // on the number line: the update that ends nearest to the pointer
    const {left, width} = ground.getBoundingClientRect(), input = steer.querySelector("input");
    if (!event.buttons) return;
    const wish = (event.clientX - left - width / 2) / (width / 2 - 10) * reach;
    const nearest = signed.reduce((a, b) => (Math.abs(b - wish) < Math.abs(a - wish) ? b : a));
    input.value = signed.indexOf(nearest);
    input.dispatchEvent(new Event("input"));
  };
  ground.addEventListener("pointerdown", drag);
  ground.addEventListener("pointermove", drag);

  return width => {
    const part = width < 620 ? width : Math.floor((width - 10) / 2), f = byName[state.format];
    const w = round(f, state.weight), terms = Array(state.times).fill(Math.fround(state.update));
    const runs = Object.fromEntries(formats.map(one => [one.name, race(one, state.weight, terms)]));
    runs["fp16 + Kahan"] = kahan(byName.fp16, state.weight, terms);
    const {nodes, reach: now} = landscape(f, w, state.update, part);
    reach = now;
    for (const [svg, drawn] of [[ground, nodes], [sums, curves(runs, state.update, part)]]) {
      svg.setAttribute("width", part);
      svg.replaceChildren(...drawn);
    }
    const ends = Object.entries(runs).map(([name, totals]) => {
      const since = state.update && stuck(name, totals);
      return `${name} ${written(totals.at(-1), 5)}${since ? ` (stuck from addition ${since} on)` : ""}`;
    });
    stage.say(`${landing(f, w, state.update)} After ${state.times.toLocaleString("en")} `
      + `such updates: ${ends.join(", ")}.`);
  };
}
